// Server-sent events over fetch: unlike EventSource it can send a key and a body, and tells the status.

const KEY = 'surefoot-key';

export const key = {
  get() { try { return sessionStorage.getItem(KEY) ?? ''; } catch { return this.held ?? ''; } },
  set(value) { this.held = value; try { sessionStorage.setItem(KEY, value); } catch { /* this page only, then */ } },
};

export function headers(more = {}) {
  const held = key.get();
  return held ? { ...more, Authorization: `Bearer ${held}` } : more;
}

export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The response, or `Refused` with what the server says. */
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers), cache: 'no-store' });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try { message = (await response.json()).error?.message ?? message; } catch { /* not JSON */ }
  throw new Refused(response.status, message, Number(response.headers.get('Retry-After')) || null);
}

/** Yields {event, data} of a response; lines may end anywhere in a chunk, and so may characters. */
export async function* events(response, silence = null) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await (silence ? within(reader.read(), silence) : reader.read());
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      for (let end; (end = rest.indexOf('\n\n')) >= 0; rest = rest.slice(end + 2)) {
        let event = 'message';
        const data = [];
        for (const line of rest.slice(0, end).split('\n')) {
          if (line.startsWith('event:')) event = line.slice(6).trim();
          else if (line.startsWith('data:')) data.push(line.slice(5).trimStart());
        }
        if (data.length) yield { event, data: data.join('\n') };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function within(promise, ms) {
  let timer;
  const late = new Promise((_, reject) => { timer = setTimeout(() => reject(new Error('silence')), ms); });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
