// Shows lists of steps and groups, and a group side by side. The address says what is shown:
// #steps, #groups, #step=3, #failure=tool, #group=3.17&color=gap&order=reward. Text of the run is
// set as text, never as HTML.
const about = JSON.parse(document.getElementById("about").textContent);
const page = document.getElementById("page"), tip = document.getElementById("tip");
const MOST_TOKENS = 3000; // of one turn that are drawn at once
const state = { color: "none", order: "number", sort: {} };

function el(tag, css, ...children) {
  const e = document.createElement(tag);
  if (css) e.className = css;
  e.append(...children.filter(c => c !== null && c !== undefined));
  return e;
}
function show(...children) {
  page.replaceChildren(...children.filter(c => c !== null));
}
function link(text, href, css) {
  const a = el("a", css, text);
  a.href = href;
  return a;
}
function num(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}
const sum = values => values.reduce((a, b) => a + b, 0);
const failed = of => sum(Object.values(of));
const kinds = of => Object.entries(of).map(([kind, n]) => `${n} ${kind}`).join(", ");

// ---- lists

const STEPS = [
  ["Step", s => s.step], ["Groups", s => s.groups, "recorded groups"],
  ["Reward", s => s.reward], ["Spread", s => s.spread, "mean standard deviation within a group"],
  ["Failures", s => failed(s.failures), "rollouts that failed", s => kinds(s.failures) || "0"],
  ["Length", s => s.length, "trained tokens of a rollout"], ["Cut", s => s.cut, "answers cut short"],
  ["Forks", s => s.forks], ["Gap", s => s.gap, "mean |trainer - server| logprob"],
  ["Staleness", s => s.staleness, "largest, in versions"],
];
const GROUPS = [
  ["Step", g => g.step], ["Episode", g => g.episode],
  ["Prompt", g => g.prompt, "its end", g => g.prompt.length > 42 ? "… " + g.prompt.slice(-40)
    : g.prompt || g.row],
  ["Reward", g => g.reward, "mean"], ["Spread", g => g.spread, "standard deviation of rewards"],
  ["Rollouts", g => g.rewards.length],
  ["Failures", g => failed(g.failures), "rollouts that failed",
    g => (kinds(g.failures) || "0") + (g.accepted ? "" : " (rejected)")],
  ["Length", g => g.length, "trained tokens of a rollout"], ["Turns", g => g.turns, "most"],
  ["Forks", g => g.forks], ["Cut", g => g.cut, "answers cut short"],
  ["Staleness", g => g.staleness, "largest, in versions"],
];

function table(name, columns, rows, open) {
  const sort = state.sort[name] ??= { column: 0, up: false };
  const draw = () => {
    const value = columns[sort.column][1], sign = sort.up ? 1 : -1;
    const key = row => value(row) ?? -Infinity;
    const sorted = [...rows].sort((a, b) => {
      const x = key(a), y = key(b);
      return sign * (typeof x === "string" ? x.localeCompare(y) : x < y ? -1 : x > y ? 1 : 0);
    });
    const head = el("tr", "", ...columns.map(([title, , hint], i) => {
      const th = el("th", title === "Prompt" ? "" : "num", title);
      if (hint) th.title = hint;
      if (i === sort.column) th.setAttribute("aria-sort", sort.up ? "ascending" : "descending");
      th.onclick = () => {
        sort.up = i === sort.column ? !sort.up : title === "Prompt";
        sort.column = i;
        holder.replaceChildren(draw());
      };
      return th;
    }));
    const body = el("tbody");
    const more = (from) => {
      for (const row of sorted.slice(from, from + 500)) {
        const tr = el("tr", row.details === false ? "thin" : "", ...columns.map(c => {
          const text = c[3] ? c[3](row) : c[1](row);
          const shown = typeof text === "string" ? text : num(text);
          const css = c[0] === "Prompt" ? "text" : "num";
          return el("td", c[0] === "Failures" && c[1](row) ? `${css} bad` : css, shown);
        }));
        tr.onclick = () => { location.hash = open(row); };
        body.append(tr);
      }
      if (from + 500 < sorted.length) {
        const td = el("td", "link", `show more of ${sorted.length}`), tr = el("tr", "", td);
        td.colSpan = columns.length;
        td.onclick = event => { event.stopPropagation(); tr.remove(); more(from + 500); };
        body.append(tr);
      }
    };
    more(0);
    return el("table", "", el("thead", "", head), body);
  };
  const holder = el("div", "panel list");
  holder.replaceChildren(draw());
  return holder;
}

function path(...parts) {
  const items = [link(about.run, "#steps"), ...parts];
  return el("div", "path", ...items.flatMap((p, i) => [i ? el("span", "", "›") : null, p])
    .map(p => typeof p === "string" ? el("span", "", p) : p));
}

function showSteps(note = "") {
  const all = {};
  for (const s of about.steps)
    for (const [kind, n] of Object.entries(s.failures)) all[kind] = (all[kind] ?? 0) + n;
  const chips = Object.entries(all).map(([k, n]) => link(`${n} ${k}`, `#failure=${k}`, "chip fail"));
  show(
    el("header", "", el("h1", "", about.run), el("p", "", `episodes, as of ${about.written}`)),
    note ? el("p", "note bad", note) : null,
    el("div", "bar", link(`all ${about.groups.length} groups`, "#groups", "link"),
      chips.length ? el("span", "", "failures: ", ...chips) : el("span", "note", "no failures")),
    table("steps", STEPS, about.steps, s => `step=${s.step}`));
}

function showGroups(title, groups) {
  const lacking = groups.filter(g => !g.details).length;
  show(
    path(title), el("h2", "", title),
    lacking ? el("p", "note", `${lacking} of ${groups.length} are listed without details (grey), ` +
      "to keep this file small: megarl view RUN --steps A-B has those of fewer steps.") : null,
    table("groups", GROUPS, groups, g => `group=${g.name}`));
}

// ---- a group

const draws = new Map(); // span -> [row, token]

const CALLS = [ // the tags of the formats of tool calls
  /<tool_call>([^]*?)(?:<\/tool_call>|$)/g, /<\|python_tag\|>([^]*?)(?:<\|e[om]t_id\|>|$)/g,
  /<｜tool▁call▁begin｜>([^]*?)(?:<｜tool▁call▁end｜>|$)/g, /^\s*(\{\s*"name"[^]*?\})\s*(?:<\||$)/g,
];
function calls(text) {
  const said = text.slice(text.lastIndexOf("</think>") + 1);
  return CALLS.flatMap(tag => [...said.matchAll(tag)]).map(match => {
    const inside = match[1].trim();
    try {
      const call = JSON.parse(inside), told = call.arguments ?? call.parameters ?? {};
      return el("div", "call", el("b", "", `calls ${call.name} `),
        el("code", "", typeof told === "string" ? told : JSON.stringify(told, null, 1)));
    } catch {
      return el("div", "call", el("b", "", "calls "), el("code", "", inside));
    }
  });
}

function tokens(row, begin, end) {
  const pre = el("pre");
  const more = from => {
    const to = Math.min(end, from + MOST_TOKENS);
    for (let i = from; i < to; i++) {
      const text = i === begin ? row.text[i].replace(/^\n+/, "⏎") : row.text[i];
      const span = el("span", row.special[i] || text !== row.text[i] ? "tok special" : "tok", text);
      draws.set(span, [row, i]);
      paint(span, state.painter.of(row, i));
      pre.append(span);
    }
    if (to < end) {
      const rest = el("span", "link", ` … ${end - to} more tokens`);
      rest.onclick = () => { rest.remove(); more(to); };
      pre.append(rest);
    }
  };
  more(begin);
  return pre;
}

const WHO = { model: "model", shared: "model, trained in an earlier branch", told: "environment" };
function turn(row, { who, begin, end }) {
  const versions = [...new Set(row.versions.subarray(begin, end))].filter(v => v >= 0);
  const facts = [`${end - begin} tokens`];
  if (versions.length) facts.push(`version ${versions.join(", ")}`);
  if (who === "model" && row.gap) {
    const gap = sum([...row.gap.subarray(begin, end)].map(Math.abs)) / (end - begin);
    facts.push(`gap ${num(gap)}`);
  }
  const earned = row.token_rewards ? sum([...row.token_rewards.subarray(begin, end)]) : 0;
  if (earned) facts.push(`earned ${num(earned)}`);
  return el("div", `turn ${who}`,
    el("div", "", WHO[who], " ", el("small", "", facts.join(" · "))), tokens(row, begin, end),
    ...(who === "told" ? [] : calls(row.text.slice(begin, end).join(""))));
}

function chip(row) {
  if (row.failure) return el("span", "chip fail", `failed: ${row.failure}`);
  const css = row.reward >= 1 ? "right" : row.reward > 0 ? "part" : "wrong";
  const mark = { right: "✓", part: "◐", wrong: "✗" }[css];
  return el("span", `chip ${css}`, `${mark} reward ${num(row.reward)}`);
}

function tree(rows, all) {
  const numbers = new Map(rows.map((row, i) => [all.indexOf(row), i + 1]));
  const depth = new Map();
  return rows.map((row, i) => {
    const parent = row.fork ? numbers.get(row.fork[0]) : null;
    depth.set(i + 1, parent ? depth.get(parent) + 1 : 0);
    const from = parent ? `, leaves ${parent} at ${row.fork[1]}` : "";
    return `${"  ".repeat(depth.get(i + 1))}${parent ? "└ " : ""}branch ${i + 1}: ` +
      `${sum([...row.mask])} trained${from}`;
  }).join("\n");
}

function rollout(same, group, prompt) { // rollouts of one answer
  const rows = same[0], numbers = same.map(rows => rows[0].rollout + 1);
  const first = rows[0], trained = sum(rows.map(row => sum([...row.mask])));
  const parts = Object.entries(first.parts ?? {}).map(([k, v]) => `${k} ${num(v)}`);
  const facts = [`${trained} trained tokens`];
  const earned = rows.flatMap(row => [...row.advantages ?? []].filter((_, i) => row.mask[i]));
  if (earned.length) {
    const [low, high] = earned.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
    facts.push(low === high ? `advantage ${num(low)}` : `advantages ${num(low)} to ${num(high)}`);
  }
  const card = el("div", first.failure ? "rollout failed" : "rollout",
    el("h3", "", same.length > 1 ? `Rollouts ${numbers.join(", ")}` : `Rollout ${numbers[0]}`),
    same.length > 1 ? el("span", "chip part", `×${same.length}, the same answer`) : null, chip(first),
    rows.some(row => row.truncated) ? el("span", "chip part", "cut short") : null,
    rows.some(row => row.skipped) ? el("span", "chip fail", "update skipped") : null,
    parts.length ? el("div", "parts", `parts: ${parts.join(" · ")}`) : null,
    el("div", "parts", facts.join(" · ")),
    rows.length > 1 ? el("div", "tree", tree(rows, group.rows)) : null);
  rows.forEach((row, i) => {
    const from = row.fork ? row.fork[1] : prompt;
    const branch = el("div", rows.length > 1 ? "branch" : "");
    if (row.fork) branch.append(el("div", "fork", `branch ${i + 1}, from token ${from} on`));
    branch.append(...turnsOf(row, from).map(t => turn(row, t)));
    if (from >= row.length) branch.append(el("p", "note", "nothing was written"));
    card.append(branch);
  });
  return card;
}

function facts(line, group) {
  const list = el("dl", "facts");
  const say = (name, text) => list.append(el("dt", "", name), el("dd", "", text));
  for (const [name, value] of Object.entries(group.data)) say(name, String(value));
  const lost = group.failed.map(([kind, n]) => n ? `${kind} (${n} tokens)` : kind);
  if (lost.length) say("failed", lost.join(", ") + `; ${group.retried} made anew`);
  if (!group.accepted) say("rejected", "nothing of it was trained, another row took its place");
  const versions = [...new Set(line.versions)];
  if (versions.length) say("weights", `version ${versions.join(" to ")}; the batch of step ${line.step}`);
  say("took", `${num(group.latency)} s`);
  return list;
}

function chooser(title, options, key, name, redraw) {
  const select = el("select");
  for (const [value, text, off] of options) {
    const option = el("option", "", text);
    Object.assign(option, { value, disabled: off, selected: value === state[key] });
    select.append(option);
  }
  select.onchange = () => {
    state[key] = select.value;
    history.replaceState(null, "", `#group=${name}&color=${state.color}&order=${state.order}`);
    redraw();
  };
  return el("label", "", `${title} `, select);
}

async function showGroup(name) {
  const i = about.groups.findIndex(g => g.name === name), line = about.groups[i];
  if (!line) return showSteps(`This page has no group ${name}.`);
  const way = path(link(`step ${line.step}`, `#step=${line.step}`), `episode ${line.episode}`);
  const step = (text, j) => {
    const button = el("button", "", text);
    button.disabled = !about.groups[j];
    button.onclick = () => { location.hash = `group=${about.groups[j].name}`; };
    return button;
  };
  const walk = el("span", "", step("‹ before", i - 1), " ", step("next ›", i + 1));
  if (!line.details) {
    show(way, el("div", "bar", walk), el("p", "note", "This file has no details of " +
      `this group: megarl view RUN --steps ${line.step} has those.`));
    return;
  }
  let group;
  try {
    group = await load(name);
  } catch (error) {
    show(way, el("p", "note", `This browser cannot read the record: ${error}`));
    return;
  }
  if (asked().get("group") !== name) return; // another one was asked for meanwhile
  const redraw = () => {
    draws.clear();
    state.painter = COLORS[state.color][1](group.rows);
    if (!state.painter.has) state.painter = COLORS.none[1](group.rows);
    const prompt = promptLength(group.rows), rollouts = new Map();
    for (const row of group.rows)
      rollouts.set(row.rollout, [...(rollouts.get(row.rollout) ?? []), row]);
    const ordered = [...rollouts.values()];
    if (state.order === "reward")
      ordered.sort((a, b) => (b[0].failure ? -Infinity : b[0].reward) - (a[0].failure ? -Infinity : a[0].reward));
    const legend = state.painter.legend.map(([hue, share, text]) => {
      const swatch = el("i", "swatch");
      paint(swatch, [hue, share]);
      return el("span", "note", swatch, text);
    });
    const options = Object.entries(COLORS).map(([key, [text, make]]) => {
      const off = !make(group.rows).has;
      return [key, off ? `${text} (not computed)` : text, off];
    });
    const orders = [["number", "number"], ["reward", "reward"]];
    show(way, el("div", "bar", walk,
      chooser("colour by", options, "color", name, redraw),
      chooser("order by", orders, "order", name, redraw),
      el("span", "", ...legend)), facts(line, group));
    if (prompt) page.append(el("h2", "", "Prompt"), el("div", "panel prompt",
      el("div", "turn told", tokens(group.rows[0], 0, prompt))));
    page.append(el("h2", "", `${rollouts.size} rollouts`));
    const answers = new Map();
    for (const rows of ordered) {
      const key = rows.map(row => [row.failure, row.reward, row.skipped, ...row.ids]).join();
      answers.set(key, [...(answers.get(key) ?? []), rows]);
    }
    page.append(el("div", "group", ...[...answers.values()].map(same => rollout(same, group, prompt))));
  };
  redraw();
}

// ---- what a token says when one points at it

page.addEventListener("pointerover", event => {
  const found = draws.get(event.target);
  if (!found) { tip.hidden = true; return; }
  const [row, i] = found, lines = [];
  const say = (name, value) => lines.push(el("div", "", el("span", "", name), el("strong", "", value)));
  say("token", `${row.ids[i]} at ${i}`);
  say("loss mask", row.mask[i] ? "trained" : "not trained");
  if (wrote(row, i)) {
    say("version", String(row.versions[i]));
    say("logprob, server", num(row.logprobs[i], 4));
    if (row.prox_logp) {
      say("logprob, trainer", num(row.prox_logp[i], 4));
      say("gap", num(row.gap[i]));
    }
    if (row.entropy) say("entropy", num(row.entropy[i]));
    if (row.advantages) say("advantage", num(row.advantages[i]));
    if (row.token_rewards?.[i]) say("earned", num(row.token_rewards[i]));
  }
  tip.replaceChildren(el("b", "", JSON.stringify(row.text[i])), ...lines);
  tip.hidden = false;
  const box = event.target.getBoundingClientRect(), high = tip.offsetHeight, wide = tip.offsetWidth;
  const below = box.bottom + 6 + high < innerHeight;
  tip.style.top = `${Math.max(4, below ? box.bottom + 6 : box.top - high - 6)}px`;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - wide - 8))}px`;
});

function asked() {
  return new URLSearchParams(location.hash.slice(1));
}
function route() {
  tip.hidden = true;
  const [[what, value]] = [...asked(), ["steps", ""]];
  if (Object.hasOwn(COLORS, asked().get("color"))) state.color = asked().get("color");
  if (asked().has("order")) state.order = asked().get("order");
  if (what === "group") showGroup(value);
  else if (what === "step")
    showGroups(`Step ${value}`, about.groups.filter(g => String(g.step) === value));
  else if (what === "failure")
    showGroups(`Failures: ${value}`, about.groups.filter(g => Object.hasOwn(g.failures, value)));
  else if (what === "groups") showGroups("All groups", about.groups);
  else showSteps();
}
addEventListener("hashchange", () => { scrollTo(0, 0); route(); });
route();
