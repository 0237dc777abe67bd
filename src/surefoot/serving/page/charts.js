// Small charts as SVG. Each is drawn anew into a box of fixed height: numbers may change, the layout never does.

const SPACE = 'http://www.w3.org/2000/svg';

function node(name, attributes, ...children) {
  const made = document.createElementNS(SPACE, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

const text = (x, y, said, anchor = 'start', style = '') => node('text', { x, y, 'text-anchor': anchor, class: style }, said);

export const number = (value, digits = 1) =>
  value === null || value === undefined || !Number.isFinite(value) ? '–'
    : value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** The smallest of 1, 2, 2.5, 5 × 10ⁿ that is at least `value`. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * unit).find((step) => step >= value * 0.9999);
}

const short = (value) => (value >= 10 || value === 0 ? number(value, 0) : number(value, value < 1 ? 2 : 1)).replace(/\.?0+$/, (zeros) => (zeros.startsWith('.') ? '' : zeros));

class Frame {
  constructor(box, { left = 38, right = 12, top = 10, bottom = 22 } = {}) {
    this.width = Math.max(box.clientWidth, 160);
    this.height = Number(box.dataset.height);
    Object.assign(this, { left, right: this.width - right, top, bottom: this.height - bottom });
    this.box = box;
    this.parts = [];
  }

  add(...parts) { this.parts.push(...parts); }

  x(share) { return this.left + (this.right - this.left) * share; }

  y(share) { return this.bottom - (this.bottom - this.top) * Math.max(0, Math.min(1, share)); }

  /** Grid lines with labels at 0, half and whole of the vertical axis. */
  axis(most, label) {
    for (const share of [0, 0.5, 1]) {
      this.add(node('line', { x1: this.left, x2: this.right, y1: this.y(share), y2: this.y(share), class: 'grid' }));
      this.add(text(this.left - 6, this.y(share) + 4, label(share * most), 'end'));
    }
  }

  show(summary) {
    const svg = node('svg', { viewBox: `0 0 ${this.width} ${this.height}`, role: 'img', 'aria-label': summary });
    svg.append(...this.parts);
    this.box.replaceChildren(svg);
  }
}

function empty(box, said) {
  const frame = new Frame(box);
  frame.axis(1, () => '');
  frame.add(text((frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2 + 4, said, 'middle', 'void'));
  frame.show(said);
}

const path = (points) => points.map(([x, y], i) => `${i ? 'L' : 'M'}${x.toFixed(1)},${y.toFixed(1)}`).join('');

/** samples: [[time, value]], oldest first; the axis is `span` seconds long and ends with the newest. */
export function timeline(box, samples, span) {
  if (!samples.length) return empty(box, 'No sample yet');
  const frame = new Frame(box);
  const end = samples[samples.length - 1][0];
  const most = ceiling(Math.max(...samples.map(([, value]) => value), 1));
  frame.axis(most, short);
  const at = ([time, value]) => [frame.x(1 - (end - time) / span), frame.y(value / most)];
  // A gap in the samples (the server was away) is a gap in the line.
  const runs = [];
  samples.filter(([time]) => end - time <= span).forEach((sample, i, all) => {
    if (!i || sample[0] - all[i - 1][0] > 5) runs.push([]);
    runs[runs.length - 1].push(at(sample));
  });
  for (const run of runs) {
    frame.add(node('path', { d: `${path(run)}L${run[run.length - 1][0]},${frame.bottom}L${run[0][0]},${frame.bottom}Z`, class: 'area' }));
    frame.add(node('path', { d: path(run), class: 'line' }));
  }
  for (const minutes of frame.width > 420 ? [10, 8, 6, 4, 2] : [10, 5]) {
    frame.add(text(frame.x(1 - (minutes * 60) / span), frame.height - 5, `−${minutes} min`, minutes === 10 ? 'start' : 'middle'));
  }
  frame.add(text(frame.right, frame.height - 5, 'now', 'end'));
  const last = samples[samples.length - 1][1];
  return frame.show(`Tokens per second over ten minutes: now ${number(last)}, at most ${number(Math.max(...samples.map(([, value]) => value)))}`);
}

/** pairs: [[label, share]] */
export function bars(box, pairs, what) {
  if (!pairs.length) return empty(box, 'Nothing drafted yet');
  const frame = new Frame(box, { top: 22 });
  const most = Math.max(...pairs.map(([, share]) => share));
  const top = [0.25, 0.5, 1].find((step) => step >= most) ?? 1;
  frame.axis(top, (share) => `${short(share * 100)}%`);
  const slot = (frame.right - frame.left) / pairs.length;
  const wide = Math.min(slot * 0.7, 46);
  pairs.forEach(([label, share], i) => {
    const x = frame.left + slot * (i + 0.5);
    frame.add(node('rect', { x: x - wide / 2, width: wide, y: frame.y(share / top), height: frame.bottom - frame.y(share / top), class: 'bar-fill' }));
    frame.add(text(x, frame.height - 5, label, 'middle'));
    if (slot > 26) frame.add(text(x, frame.y(share / top) - 4, `${number(share * 100, share < 0.1 ? 1 : 0)}`, 'middle', 'strong'));
  });
  return frame.show(`${what}: ${pairs.map(([label, share]) => `${label}: ${number(share * 100, 0)} %`).join(', ')}`);
}

/** Two series of shares by position 1, 2, …; null is unknown. */
export function positions(box, first, second, names) {
  if (!first.concat(second).some((value) => value !== null)) return empty(box, 'Nothing verified yet');
  const frame = new Frame(box);
  frame.axis(1, (share) => `${short(share * 100)}%`);
  const count = Math.max(first.length, second.length);
  const x = (i) => (count < 2 ? (frame.left + frame.right) / 2 : frame.left + 14 + ((frame.right - frame.left - 28) * i) / (count - 1));
  const known = (series) => series.map((value, i) => [x(i), value]).filter(([, value]) => value !== null).map(([at, value]) => [at, frame.y(value)]);
  for (let i = 0; i < count; i += 1) frame.add(text(x(i), frame.height - 5, String(i + 1), 'middle'));
  const [a, b] = [known(first), known(second)];
  frame.add(node('path', { d: path(a), class: 'line' }), node('path', { d: path(b), class: 'line second' }));
  frame.add(...a.map(([cx, cy]) => node('circle', { cx, cy, r: 3.5, class: 'dot-first' })));
  frame.add(...b.map(([cx, cy]) => node('rect', { x: cx - 3.5, y: cy - 3.5, width: 7, height: 7, class: 'dot-second' })));
  const told = (series) => series.map((value) => (value === null ? 'not known' : `${number(value * 100, 0)} %`)).join(', ');
  return frame.show(`By position: ${names[0]} ${told(first) || 'not known'}; ${names[1]} ${told(second) || 'not known'}`);
}

let reach = 0;

/** V over rows, with the point at which the engine runs. */
export function curve(box, allRows, allMs, point) {
  if (!allRows.length) return empty(box, 'No cost table');
  // Only as far as the engine goes, or the point would always sit in the corner; the range grows and never shrinks.
  reach = Math.max(reach, 16, 2 ** Math.ceil(Math.log2(2 * (point?.rows ?? 1))));
  const shown = allRows.filter((row) => row <= reach).length;
  const [rows, ms] = [allRows.slice(0, Math.max(shown, 2)), allMs.slice(0, Math.max(shown, 2))];
  const frame = new Frame(box);
  const [least, most] = [rows[0], rows[rows.length - 1]];
  const top = ceiling(Math.max(...ms));
  frame.axis(top, short);
  const x = (row) => frame.x((Math.min(row, most) - least) / Math.max(most - least, 1));
  const points = rows.map((row, i) => [x(row), frame.y(ms[i] / top)]);
  frame.add(node('path', { d: path(points), class: 'line' }));
  const marks = [least, Math.round((least + most) / 2), most];
  marks.forEach((row, i) => frame.add(text(x(row), frame.height - 5, i === 2 ? `${row} rows` : String(row), ['start', 'middle', 'end'][i])));
  frame.add(text(frame.left + 4, frame.top + 12, 'ms'));
  if (point) {
    const value = valueAt(rows, ms, point.rows);
    const [px, py] = [x(point.rows), frame.y(value / top)];
    frame.add(node('line', { x1: px, x2: px, y1: py, y2: frame.bottom, class: 'drop' }), node('circle', { cx: px, cy: py, r: 5.5, class: 'point' }));
  }
  return frame.show(`Cost of the target's pass from ${number(ms[0], 2)} ms for ${least} rows to ${number(ms[ms.length - 1], 2)} ms for ${most} rows${point ? `; now ${number(point.rows)} rows` : ''}`);
}

/** The curve's value between its points. */
export function valueAt(rows, ms, row) {
  const above = rows.findIndex((known) => known >= row);
  if (above < 0) return ms[ms.length - 1];
  if (above === 0) return ms[0];
  const share = (row - rows[above - 1]) / (rows[above] - rows[above - 1]);
  return ms[above - 1] + share * (ms[above] - ms[above - 1]);
}
