// How every token came: kinds, names, and the pieces of text that carry them.

export const KINDS = [
  { kind: 'draft', name: 'accepted draft', about: "the drafter's own token, which the target accepted" },
  { kind: 'lookup', name: 'accepted, looked up', about: 'a token copied from the text so far, which the target accepted' },
  { kind: 'prediction', name: 'accepted prediction', about: "a token of the request's prediction, which the target accepted" },
  { kind: 'recovered', name: 'recovered', about: 'drawn where a draft was rejected' },
  { kind: 'bonus', name: 'bonus', about: 'drawn after every verified draft was accepted' },
  { kind: 'target', name: 'target', about: 'a step without drafts' },
];

/** The kind of an origin as the server names it. */
export function kindOf(origin) {
  if (origin === 'recovered' || origin === 'bonus' || origin === 'target') return origin;
  if (origin.startsWith('prompt-lookup')) return 'lookup';
  return origin === 'prediction' ? 'prediction' : 'draft';
}

const BROKEN = '\ufffd';

/**
 * Cuts streamed text into pieces by token. Text comes only once its characters are complete, and a stop string or a
 * special token may hold it back or leave it out; so tokens wait here until their text comes, and what fits no single
 * token carries the origin of the last token that it took. No text is ever lost or changed.
 */
export class Pieces {
  constructor() { this.waiting = []; }

  /** Takes one step's tokens and the text that it released; returns [{text, origin, tokens}]. */
  push(text, tokens, origins) {
    tokens.forEach((token, index) => this.waiting.push({ text: token, origin: origins[index] ?? 'target' }));
    const pieces = [];
    let rest = text;
    let last = this.waiting[0]?.origin ?? 'target';
    const emit = (length, origin) => {
      pieces.push({ text: rest.slice(0, length), origin });
      rest = rest.slice(length);
    };
    while (rest && this.waiting.length) {
      const head = this.waiting[0];
      const bare = head.text.trimStart();
      if (head.text && !head.text.includes(BROKEN) && rest.startsWith(head.text)) {
        emit(head.text.length, head.origin);
        this.waiting.shift();
      } else if (head.text.includes(BROKEN)) { // bytes of characters: up to where the next whole token begins
        let next = 0;
        while (next < this.waiting.length && this.waiting[next].text.includes(BROKEN)) next += 1;
        const whole = this.waiting[next]?.text;
        const at = whole ? rest.indexOf(whole) : -1;
        last = this.waiting[next - 1].origin;
        this.waiting.splice(0, next);
        if (at !== 0) emit(at > 0 ? at : rest.length, last);
        continue;
      } else if (bare && bare !== head.text && rest.startsWith(bare)) { // a tokenizer that drops a text's first space
        emit(bare.length, head.origin);
        this.waiting.shift();
      } else { // not shown (a special token), or shown otherwise
        this.waiting.shift();
      }
      last = head.origin;
    }
    if (rest) emit(rest.length, last);
    return pieces;
  }
}
