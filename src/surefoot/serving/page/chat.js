// The chat box: streams from the server's own /v1/chat/completions and marks every token by how it came.

import { number } from './charts.js';
import { Refused, ask, events } from './stream.js';
import { KINDS, Pieces, kindOf } from './tokens.js';

const $ = (id) => document.getElementById(id);

function made(name, style, ...children) {
  const element = document.createElement(name);
  if (style) element.className = style;
  element.append(...children);
  return element;
}

/** One answer as it comes: its text, its counts and its times. */
class Answer {
  constructor(targetOnly) {
    this.targetOnly = targetOnly;
    this.text = '';
    this.counts = new Map();
    this.tokens = this.steps = this.firstBlock = 0;
    this.begun = performance.now();
    this.first = this.last = null;
    this.finish = null;
    this.pieces = new Pieces();
  }

  take(tokens, origins) {
    if (!tokens.length) return;
    this.last = performance.now();
    if (this.first === null) { this.first = this.last; this.firstBlock = tokens.length; }
    this.tokens += tokens.length;
    this.steps += 1;
    origins.forEach((origin) => this.counts.set(kindOf(origin), (this.counts.get(kindOf(origin)) ?? 0) + 1));
  }

  get rate() {
    const seconds = (this.last - this.first) / 1000;
    return this.first !== null && seconds > 0 ? (this.tokens - this.firstBlock) / seconds : null;
  }

  get perStep() { return this.steps ? this.tokens / this.steps : null; }
}

export class Chat {
  constructor(onLocked) {
    this.onLocked = onLocked;
    this.messages = [];
    this.under = null; // AbortController of the answer under way
    this.legend(new Map());
    $('ask').addEventListener('submit', (event) => { event.preventDefault(); this.send(); });
    $('message').addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    document.addEventListener('keydown', (event) => { if (event.key === 'Escape' && this.under) this.under.abort(); });
    $('stop').addEventListener('click', () => this.under?.abort());
    $('clear').addEventListener('click', () => this.clear());
    for (const chip of document.querySelectorAll('.chip')) {
      chip.addEventListener('click', () => { $('message').value = chip.dataset.prompt; $('message').focus(); });
    }
  }

  legend(counts) {
    $('legend').replaceChildren(...KINDS.map(({ kind, name, about }) => {
      const item = made('li', '', made('span', `t t-${kind}`, name), made('span', 'count', String(counts.get(kind) ?? 0)));
      item.title = about;
      return item;
    }));
  }

  clear() {
    this.under?.abort();
    this.messages = [];
    $('log').replaceChildren($('chat-empty') ?? this.empty);
    this.legend(new Map());
    $('clear').disabled = true;
    $('message').focus();
  }

  async send() {
    const said = $('message').value.trim();
    if (!said || this.under) return;
    const temperature = $('temperature'), most = $('most');
    if (!temperature.reportValidity() || !most.reportValidity()) return;
    const log = $('log');
    if ($('chat-empty')) { this.empty = $('chat-empty'); log.replaceChildren(); }
    log.append(made('div', 'turn you', made('span', 'who', 'You'), made('div', 'said', said)));
    const answer = new Answer($('target-only').checked);
    const text = made('div', 'said answer caret');
    const tale = made('p', 'tale', 'Waiting for the first token …');
    const who = answer.targetOnly ? 'Answer, target-only' : 'Answer';
    const thought = made('div', 'said answer thought');
    thought.hidden = true;
    log.append(made('div', 'turn', made('span', 'who', who), thought, text, tale));
    log.scrollTop = log.scrollHeight;
    $('message').value = '';
    this.busy(new AbortController());
    this.legend(answer.counts);
    const messages = [...this.messages, { role: 'user', content: said }];
    try {
      await this.receive(answer, messages, { text, thought, tale, temperature: temperature.valueAsNumber, most: most.valueAsNumber });
      this.messages = [...messages, { role: 'assistant', content: answer.text }];
      this.told(answer, tale);
    } catch (problem) {
      const stopped = problem.name === 'AbortError';
      if (stopped && answer.text) this.messages = [...messages, { role: 'assistant', content: answer.text }];
      if (stopped) { answer.finish = 'stopped'; this.told(answer, tale); }
      else {
        tale.className = 'tale wrong';
        tale.textContent = this.reason(problem, answer);
        $('said').textContent = tale.textContent;
        if (!answer.text) $('message').value = said;
        if (problem.status === 401) this.onLocked();
      }
    } finally {
      text.classList.remove('caret');
      this.busy(null);
    }
  }

  reason(problem, answer) {
    if (problem instanceof Refused) {
      return `Refused (${problem.status}): ${problem.message}${problem.retryAfter ? ` Try again in ${problem.retryAfter} s.` : ''}`;
    }
    return answer.tokens ? `The answer broke off: ${problem.message}` : `The server cannot be reached: ${problem.message}`;
  }

  busy(controller) {
    const focused = document.activeElement;
    this.under = controller;
    $('send').disabled = Boolean(controller);
    $('stop').disabled = !controller;
    $('clear').disabled = Boolean(controller) || !this.messages.length;
    $('log').setAttribute('aria-busy', String(Boolean(controller)));
    // A button that is switched off must not take the focus with it.
    if (focused === $('send') || focused === $('stop')) (controller ? $('stop') : $('message')).focus();
  }

  async receive(answer, messages, view) {
    const body = {
      messages, stream: true, temperature: view.temperature, max_tokens: view.most,
      stream_options: { include_usage: true, include_origins: true },
    };
    if (answer.targetOnly) body.speculative = false;
    const response = await ask('/v1/chat/completions', {
      method: 'POST', body: JSON.stringify(body), headers: { 'Content-Type': 'application/json' }, signal: this.under.signal,
    });
    let ended = false;
    for await (const { data } of events(response)) {
      if (data === '[DONE]') { ended = true; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) this.step(answer, choice, view);
    }
    if (!ended) throw new Error('the connection has ended before the answer did');
  }

  step(answer, choice, { text, thought, tale }) {
    const { origins = [], tokens = [] } = choice.surefoot ?? {};
    answer.take(tokens, origins);
    const reasoning = choice.delta.reasoning_content ?? '', content = choice.delta.content ?? '';
    const pieces = answer.pieces.push(reasoning + content, tokens, origins);
    const log = $('log');
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    let left = reasoning.length;
    for (const piece of pieces) {
      const inThought = left > 0;
      left -= piece.text.length;
      const shown = made('span', `t t-${kindOf(piece.origin)}`, piece.text);
      shown.title = piece.origin;
      if (inThought) thought.hidden = false;
      (inThought ? thought : text).append(shown);
    }
    answer.text += content;
    answer.finish = choice.finish_reason ?? answer.finish;
    if (answer.tokens) {
      tale.textContent = this.summary(answer);
      this.legend(answer.counts);
    }
    if (follows) log.scrollTop = log.scrollHeight;
  }

  summary(answer) {
    const wait = answer.first === null ? null : answer.first - answer.begun;
    return `${number(answer.rate)} tok/s · ${number(answer.perStep, 2)} tok/step · ${answer.tokens} tokens · first after ${number(wait, 0)} ms`
      + `${answer.finish ? ` · ${answer.finish}` : ''}`;
  }

  told(answer, tale) {
    tale.textContent = answer.tokens ? this.summary(answer) : 'No token came.';
    $('said').textContent = `Answer ${answer.finish === 'stopped' ? 'stopped' : 'complete'}: ${tale.textContent}`;
    if (!answer.tokens) return;
    const cells = $(answer.targetOnly ? 'v-target' : 'v-spec').querySelectorAll('td');
    [number(answer.rate), number(answer.perStep, 2), String(answer.tokens)].forEach((value, i) => { cells[i].textContent = value; });
  }
}
