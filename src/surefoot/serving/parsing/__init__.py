"""From the text of an answer to text, reasoning and tool calls, piece by piece and the same whatever the pieces."""
