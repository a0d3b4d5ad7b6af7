// Reads the page's records, and says how tokens are coloured. viewer.js follows in the same script.
"use strict";

async function record(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const end = bytes.indexOf(10), found = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  let at = end + 1;
  const arrays = {};
  for (const [name, kind, count] of found.arrays) {
    const width = Number(kind.slice(2)), mixed = new Uint8Array(count * width);
    for (let plane = 0; plane < width; plane++)
      for (let i = 0; i < count; i++) mixed[i * width + plane] = bytes[at++];
    const type = { "<i4": Int32Array, "<f4": Float32Array, "|u1": Uint8Array }[kind];
    arrays[name] = new type(mixed.buffer);
  }
  return Object.assign(found, { arrays });
}

async function load(name) {
  const group = await record(`group-${name}`);
  const special = new Set(group.special);
  let at = 0;
  for (const row of group.rows) {
    const part = array => array?.subarray(at, at + row.length);
    for (const key of ["ids", "mask", "logprobs", "versions", "token_rewards"])
      row[key] = part(group.arrays[key]);
    row.text = texts(row.ids, group.pieces);
    row.special = Array.from(row.ids, id => special.has(id));
    for (const key of row.trained ? ["prox_logp", "entropy", "advantages"] : [])
      row[key] = part(group.arrays[key]);
    if (row.prox_logp) row.gap = row.prox_logp.map((x, i) => x - row.logprobs[i]);
    at += row.length;
  }
  return group;
}

// Pieces that are bytes make a character with their neighbours, which its last token shows.
function texts(ids, pieces) {
  let decoder = null;
  return Array.from(ids, id => {
    const piece = pieces[id] ?? "";
    if (typeof piece === "string") {
      const rest = decoder ? decoder.decode() : "";
      decoder = null;
      return rest + piece;
    }
    decoder ??= new TextDecoder();
    return decoder.decode(Uint8Array.from(piece), { stream: true });
  });
}

// The policy wrote what weights of some version made, whether this row trains it or another does.
const wrote = (row, i) => row.mask[i] > 0 || row.versions[i] >= 0;

function turnsOf(row, from) {
  const found = [];
  for (let i = from; i < row.length; i++) {
    const who = wrote(row, i) ? (row.mask[i] || row.failure ? "model" : "shared") : "told";
    if (found.length && found.at(-1).who === who) found.at(-1).end = i + 1;
    else found.push({ who, begin: i, end: i + 1 });
  }
  return found;
}

function promptLength(rows) {
  if (rows.length === 0) return 0;
  const first = rows[0];
  let n = Math.min(...rows.map(row => row.length));
  for (const row of rows) {
    let i = 0;
    while (i < n && !wrote(row, i) && row.ids[i] === first.ids[i]) i++;
    n = i;
  }
  return n;
}

// ---- colours: of a token [css colour, share from 0 to 1], or null

const HUES = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c8"];
function largest(rows, key) {
  const values = [];
  for (const row of rows) row[key]?.forEach((x, i) => { if (row.mask[i]) values.push(Math.abs(x)); });
  values.sort((a, b) => a - b);
  return values[Math.floor(0.99 * (values.length - 1))] || 1e-9;
}
function diverging(rows, key, more, less) { // zeros have no colour
  const scale = largest(rows, key);
  const color = x => x > 0 ? "--c0" : "--c1";
  const seen = new Set(rows.flatMap(row => [...row[key] ?? []].filter((x, i) => x && row.mask[i]).map(color)));
  const sides = [["--c0", 0.7, `${more} (to ${num(scale)})`], ["--c1", 0.7, `${less} (to -${num(scale)})`]];
  return {
    of: (row, i) => row.mask[i] && row[key]?.[i]
      ? [color(row[key][i]), Math.min(1, Math.abs(row[key][i]) / scale)] : null,
    legend: seen.size ? sides.filter(([hue]) => seen.has(hue)) : [["--c7", 0, "0 at every token"]],
    has: rows.some(row => row[key]),
  };
}
const COLORS = {
  none: ["nothing", () => ({ of: () => null, legend: [], has: true })],
  mask: ["loss mask", () => ({
    of: (row, i) => row.mask[i] ? ["--c2", 0.6] : null, legend: [["--c2", 0.6, "trained"]], has: true,
  })],
  gap: ["logprob gap", rows => diverging(rows, "gap", "trainer above server", "trainer below")],
  entropy: ["entropy", rows => {
    const scale = largest(rows, "entropy");
    return {
      of: (row, i) => row.mask[i] && row.entropy ? ["--c3", Math.min(1, row.entropy[i] / scale)] : null,
      legend: [["--c3", 0.7, `nats, to ${num(scale)}`]], has: rows.some(row => row.entropy),
    };
  }],
  logprob: ["surprise", () => ({
    of: (row, i) => wrote(row, i) ? ["--c4", Math.min(1, -row.logprobs[i] / 4)] : null,
    legend: [["--c4", 0.7, "-logprob of the server, to 4 nats"]], has: true,
  })],
  version: ["weight version", rows => {
    const all = [...new Set(rows.flatMap(row => [...row.versions]))].filter(v => v >= 0);
    const hue = v => HUES[v % HUES.length];
    return {
      of: (row, i) => wrote(row, i) ? [hue(row.versions[i]), 0.4] : null,
      legend: all.sort((a, b) => a - b).map(v => [hue(v), 0.4, `version ${v}`]), has: true,
    };
  }],
  advantage: ["advantage", rows => diverging(rows, "advantages", "advantage above 0", "below 0")],
};
function paint(e, color) {
  e.classList.toggle("colored", color !== null);
  if (color === null) return;
  e.style.setProperty("--hue", `var(${color[0]})`);
  e.style.setProperty("--share", `${(8 + 62 * color[1]).toFixed(1)}%`);
}
