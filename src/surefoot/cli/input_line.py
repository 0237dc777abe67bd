"""The line a person types into, with prompt_toolkit: history, editing, and a pasted block as one message."""

from __future__ import annotations

import sys

PROMPT, CONTINUED = "> ", "… "


class InputLine:
    """Messages from a terminal, one `read` each.

    Text that is pasted arrives whole, line ends included, where the terminal tells pasting from typing (bracketed paste);
    Alt-Enter begins another line of the same message.
    """

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.output import create_output
        from prompt_toolkit.utils import is_dumb_terminal

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            key_bindings=keys,
            prompt_continuation=CONTINUED,
            # Answers may go to a file while the prompt is shown on standard error. A terminal without escapes gets the
            # library's plain prompt, which it only gives where no output is named.
            output=None if is_dumb_terminal() else create_output(stdout=sys.stdout, always_prefer_tty=True),
        )

    def read(self) -> str | None:
        """What was typed or pasted; None after Ctrl-D on an empty line.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was typed is gone.
        """
        try:
            return self._session.prompt(PROMPT)
        except EOFError:
            return None
