// The page: reads the feed, shows every snapshot, and says so when there is none.

import { bars, curve, number, positions, timeline, valueAt } from './charts.js';
import { Chat } from './chat.js';
import { Refused, ask, events, key } from './stream.js';

const $ = (id) => document.getElementById(id);
const SPAN_S = 600;
const SILENCE_MS = 8000; // the server sends every second; a step may take longer, a dead line takes for ever
const REASONS = {
  planned: 'trimmed: fewer drafts pay more', full_window_pays: 'every draft pays', no_table: 'no cost table: all verified',
  flat_table: 'flat cost table: all verified', cold_confidences: 'no confidences yet', prefill_in_batch: 'a prompt was read beside',
  gain_too_small: 'trimming gains too little', forced: 'widths are given', nothing_drafted: 'nothing drafted',
};

let samples = [];
let latest = null;

// -- theme ---------------------------------------------------------------------------------------------------------------------

const THEMES = ['auto', 'light', 'dark'];
const theme = () => document.documentElement.dataset.theme ?? 'auto';

function showTheme() {
  const said = { auto: 'Auto', light: 'Light', dark: 'Dark' }[theme()];
  $('theme').textContent = said;
  $('theme').setAttribute('aria-label', `Colour theme: ${theme() === 'auto' ? 'as the system' : said}`);
}

$('theme').addEventListener('click', () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try { localStorage.setItem('surefoot-theme', next); } catch { /* for this visit only, then */ }
  showTheme();
});
showTheme();

// -- what a snapshot says ------------------------------------------------------------------------------------------------------

function put(id, value) {
  if ($(id).textContent !== value) $(id).textContent = value;
}

const PHASES = { ready: 'Live', starting: 'Starting', draining: 'Draining', lost: 'Engine lost', offline: 'Offline', connecting: 'Connecting', locked: 'Locked' };

function phase(name) {
  $('phase').dataset.phase = name;
  put('phase-text', PHASES[name] ?? name);
  document.body.classList.toggle('stale', name === 'offline' || name === 'lost' || name === 'locked');
}

function notice(kind, said) {
  $('notice').hidden = !said;
  $('notice').dataset.kind = kind;
  put('notice', said ?? '');
}

const percent = (share) => (share === null || share === undefined ? '–' : `${number(share * 100, 0)}\u00a0%`); // does not break between number and sign

function drawRate() {
  const seconds = samples.map(([time, rate]) => [time, rate]);
  timeline($('c-rate'), seconds, SPAN_S);
}

function show(snapshot) {
  latest = snapshot;
  const { sample } = snapshot;
  const [time] = sample;
  if (!samples.length || time > samples[samples.length - 1][0]) samples.push(sample);
  samples = samples.filter(([at]) => time - at <= SPAN_S);
  phase(snapshot.state);
  if (snapshot.state === 'lost') notice('lost', `${snapshot.message}. The server leaves; whoever watches over it should start it again.`);
  else if (snapshot.state === 'draining') notice('draining', 'The server is shutting down: answers under way may end, no new one begins.');
  else notice('', null);
  draw(snapshot);
}

function draw({ sample, server, totals, engine, requests }) {
  const [, rate, perStep, answers] = sample;
  put('model', server.model);
  put('n-rate', number(rate));
  const busy = samples.filter(([, value]) => value > 0);
  put('n-rate-note', busy.length ? `${number(busy.reduce((sum, [, value]) => sum + value, 0) / busy.length)} while busy, at most ${number(Math.max(...busy.map(([, value]) => value)))}` : 'idle');
  put('n-step', perStep ? number(perStep, 2) : '–');
  put('n-step-note', totals.steps ? `${number(totals.tokens / totals.steps, 2)} since the start` : 'no step yet');
  put('n-run', String(engine ? engine.running : answers));
  put('n-run-note', engine ? `of ${server.slots} at once; ${engine.waiting} wait` : 'running');
  put('totals', `${number(totals.requests, 0)} requests, ${number(totals.tokens, 0)} tokens since ${new Date(server.started * 1000).toLocaleString()}`);
  drawRate();
  if (engine) showEngine(engine);
  showRequests(requests);
}

function showEngine(engine) {
  put('drafter', engine.drafter === 'none' ? 'no drafter: target-only' : `drafter ${engine.drafter}, at most ${engine.gamma} drafts a step`);
  put('n-accept', engine.verified ? percent(engine.accepted / engine.verified) : '–');
  put('n-accept-note', engine.verified ? `${number(engine.accepted, 0)} of ${number(engine.verified, 0)}` : 'none verified yet');
  const used = engine.cache_used.reduce((a, b) => a + b, 0), total = engine.cache_total.reduce((a, b) => a + b, 0);
  put('n-cache', percent(total ? used / total : null));
  put('n-cache-note', `${number(used, 0)} of ${number(total, 0)} blocks`);

  const counts = Object.entries(engine.widths).map(([width, steps]) => [Number(width), steps]);
  const all = counts.reduce((sum, [, steps]) => sum + steps, 0);
  const byWidth = new Map(counts);
  const widths = engine.gamma && all ? Array.from({ length: engine.gamma + 1 }, (_, width) => [String(width), (byWidth.get(width) ?? 0) / all]) : [];
  bars($('c-widths'), widths, 'Share of steps by verified width');
  const mean = counts.reduce((sum, [width, steps]) => sum + width * steps, 0) / Math.max(all, 1);
  const sources = Object.entries(engine.sources).filter(([, [verified]]) => verified).map(([name, [verified, accepted]]) => `${name} ${percent(accepted / verified)}`);
  put('widths-note', all ? `% of steps; mean ${number(mean)} drafts. Accepted: ${sources.join(', ') || 'none yet'}` : "% of an answer's steps by drafts verified");

  const known = engine.labelled.some((count) => count > 0);
  positions($('c-survival'), known ? engine.predicted : [], known ? engine.observed : engine.acceptance, ['predicted', 'observed']);

  const cost = engine.cost;
  curve($('c-cost'), cost?.rows ?? [], cost?.ms ?? [], cost?.point);
  if (!cost) put('cost-note', engine.drafter === 'none' ? 'not needed without a drafter' : 'no cost table: every draft is verified. Start with --profile.');
  else if (!cost.point) put('cost-note', `idle; ${cost.steadiness}`);
  else {
    const { rows, predicted_ms: predicted, measured_ms: measured } = cost.point;
    const step = predicted === undefined ? '' : `. Whole step: ${number(predicted, 1)} ms predicted, ${number(measured, 1)} measured`;
    put('cost-note', `now ${number(rows)} rows a step, ${number(valueAt(cost.rows, cost.ms, rows), 1)} ms${step}`);
  }

  const steps = Object.values(engine.reasons).reduce((sum, count) => sum + count, 0);
  const box = $('c-reasons');
  box.replaceChildren(...Object.entries(engine.reasons).slice(0, 5).map(([name, count]) => {
    const row = document.createElement('div');
    row.className = 'reason';
    const [said, share, meter, fill] = ['span', 'span', 'div', 'i'].map((kind) => document.createElement(kind));
    said.textContent = REASONS[name] ?? name;
    share.textContent = `${number((count / steps) * 100, 1)} %`;
    meter.className = 'meter';
    fill.style.transform = `scaleX(${count / steps})`;
    meter.append(fill);
    row.append(said, share, meter);
    return row;
  }));
  if (!steps) box.textContent = engine.drafter === 'none' ? 'Nothing to plan without a drafter.' : 'No step yet.';
  const even = cost?.break_even;
  put('planner-note', even ? `Drafts pay from an acceptance of ${percent(even.acceptance)} per token (width ${even.width}).` : `Planner: ${engine.planner}.`);
}

function showRequests(requests) {
  const body = $('requests');
  if (!requests.length) return;
  body.replaceChildren(...requests.map((request) => {
    const row = document.createElement('tr');
    if (!request.finish) row.className = 'now';
    const cells = [
      [request.id, 'id'], [request.endpoint + (request.speculative ? '' : ', target-only'), ''], [request.cached ? `${request.prompt} (${request.cached} cached)` : String(request.prompt), 'n'],
      [String(request.tokens), 'n'], [number(request.tokens_per_step, 2), 'n'], [number(request.tokens_per_s), 'n'],
      [request.ttft_ms === null ? '–' : `${number(request.ttft_ms, 0)} ms`, 'n'], [request.finish ?? (request.ttft_ms === null ? 'waiting' : 'running'), ''],
    ];
    row.append(...cells.map(([said, style]) => {
      const cell = document.createElement('td');
      cell.textContent = said;
      if (style) cell.className = style;
      return cell;
    }));
    return row;
  }));
}

// -- the feed ------------------------------------------------------------------------------------------------------------------

let wake = null;
const sleep = (ms) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, ms); });

function lock() {
  phase('locked');
  $('keybox').hidden = false;
  notice('locked', key.get() ? 'The server does not know this key.' : null);
}

// A page that nobody sees does not watch: it costs the server nothing, and a browser has six connections for all its tabs.
let feed = null;
document.addEventListener('visibilitychange', () => (document.hidden ? feed?.abort() : wake?.()));

async function follow() {
  for (let failures = 0; ;) {
    while (document.hidden) await new Promise((resolve) => { wake = resolve; });
    feed = new AbortController();
    try {
      const response = await ask('/live', { signal: feed.signal });
      $('keybox').hidden = true;
      notice('', null);
      for await (const { event, data } of events(response, SILENCE_MS)) {
        failures = 0;
        const told = JSON.parse(data);
        if (event === 'history') samples = told.samples;
        else if (event === 'snapshot') show(told);
      }
      if (latest?.state !== 'lost') throw new Error('the server has closed the feed');
      await sleep(2000);
    } catch (problem) {
      if (feed.signal.aborted) continue;
      if (problem instanceof Refused && problem.status === 401) {
        lock();
        await new Promise((resolve) => { wake = resolve; });
        phase('connecting');
        continue;
      }
      failures += 1;
      const seconds = Math.min(2 ** (failures - 1), 15);
      phase('offline');
      notice('offline', problem instanceof Refused ? `The feed is refused: ${problem.message}` : `No connection to the server; trying again ${seconds > 1 ? `in ${seconds} s` : 'now'}. The figures are the last ones known.`);
      await sleep(seconds * 1000);
    }
  }
}

$('keybox').addEventListener('submit', (event) => {
  event.preventDefault();
  key.set($('key').value.trim());
  $('key').value = '';
  wake?.();
});
window.addEventListener('online', () => wake?.());

function redraw() {
  if (latest) draw(latest);
  else {
    drawRate();
    bars($('c-widths'), [], '');
    positions($('c-survival'), [], [], []);
    curve($('c-cost'), [], [], null);
  }
}

let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== width) { width = document.body.clientWidth; redraw(); }
}).observe(document.body);
const chat = new Chat(lock);
redraw();
follow();
export { chat };
