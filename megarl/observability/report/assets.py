"""Style and script of the report, as text: the file must stand alone."""

CSS = """
:root {
  color-scheme: light dark;
  --bg: #f6f7f9; --card: #ffffff; --ink: #16191f; --soft: #5b6472; --faint: #8b94a3;
  --line: #e3e7ed; --grid: #edf0f4; --good: #12805c; --good-bg: #e2f5ed; --bad: #b3372f;
  --bad-bg: #fbe9e7; --c0: #2563c9; --c1: #d9730d; --c2: #14936a; --c3: #8a56d8; --c4: #c8417f;
  --c5: #a58a0b; --c6: #0f8ea6; --c7: #9aa3b1; --c8: #8c5a3c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #101318; --card: #181c23; --ink: #e8ebf0; --soft: #a3acba; --faint: #778191;
    --line: #2a303a; --grid: #232932; --good: #4fcf9f; --good-bg: #12312a; --bad: #f1857c;
    --bad-bg: #3a1f1e; --c0: #6ea1ff; --c1: #f59b45; --c2: #43c795; --c3: #b48cf5; --c4: #ee7bb0;
    --c5: #d8bd45; --c6: #45c1d8; --c7: #6d7787; --c8: #c79573;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
    Arial, "Liberation Sans", sans-serif;
  -webkit-font-smoothing: antialiased;
}
main { max-width: 1240px; margin: 0 auto; padding: 40px 28px 64px; }
header h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 6px; }
header p { margin: 0; color: var(--soft); }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 44px 0 14px; }
h3 { font-size: 15px; font-weight: 600; margin: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 14px; margin-top: 26px; }
.tile, .chart, .panel { background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; }
.tile { padding: 15px 18px 14px; flex: 1 1 auto; min-width: 150px; }
.tiles:has(> :nth-child(7)) > .tile { flex-basis: 22%; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 650; letter-spacing: -0.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; margin: 2px 0; }
.tile .value small { color: var(--faint); font-weight: 500; font-size: 17px; }
.tile .more { color: var(--soft); font-size: 13px; width: 0; min-width: 100%; }
.up { color: var(--good); font-weight: 600; } .down { color: var(--bad); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 16px; }
.chart { margin: 0; padding: 16px 18px 10px; break-inside: avoid; display: flex;
  flex-direction: column; }
.chart figcaption p { margin: 1px 0 0; color: var(--soft); font-size: 13px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 6px 0 0;
  padding: 0; color: var(--soft); font-size: 13px; }
.key { display: inline-block; width: 16px; height: 0; border-top: 3px solid var(--c);
  border-radius: 2px; vertical-align: middle; margin-right: 6px; }
.key.dashed { border-top-style: dashed; border-radius: 0; }
.key.raw { border-top-width: 1px; opacity: 0.55; }
.plot { position: relative; margin-top: auto; padding-top: 6px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.c8 { --c: var(--c8); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
.line.raw { stroke-width: 1; opacity: 0.32; }
.line.dashed { stroke-dasharray: 5 4; }
.whisker { fill: none; stroke: var(--c); stroke-width: 1.2; opacity: 0.6; }
.dot { fill: var(--card); stroke: var(--c); stroke-width: 2; }
.bar { fill: var(--c); opacity: 0.9; }
.grid { stroke: var(--grid); fill: none; } .axis { stroke: var(--line); fill: none; }
.tick { fill: var(--faint); font-size: 11px; font-variant-numeric: tabular-nums; }
.cursor { display: none; } .hover .cursor { display: inline; }
.cursor path { stroke: var(--faint); stroke-dasharray: 2 3; }
.cursor circle { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
.tip { position: absolute; top: 6px; pointer-events: none; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: 7px 10px; font-size: 12.5px;
  box-shadow: 0 6px 20px rgb(0 0 0 / 0.14); white-space: nowrap; z-index: 2;
  font-variant-numeric: tabular-nums; }
.tip b { display: block; font-weight: 600; margin-bottom: 2px; }
.tip div { display: flex; gap: 14px; justify-content: space-between; }
.tip span { color: var(--soft); }
.tip span i { width: 12px; }
.panel { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 10px 16px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.samples { table-layout: fixed; min-width: 720px; }
.samples pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 15em;
  overflow-y: auto; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas,
  "Liberation Mono", monospace; }
.samples .answer { color: var(--soft); font-size: 13px; margin-top: 6px; overflow-wrap: anywhere; }
.chip { display: inline-block; border-radius: 999px; padding: 0 9px; font-size: 12px;
  font-weight: 600; margin-bottom: 6px; font-variant-numeric: tabular-nums; }
.chip.right { color: var(--good); background: var(--good-bg); }
.chip.wrong { color: var(--bad); background: var(--bad-bg); }
.chip.part { color: var(--soft); background: var(--grid); }
.turn { border-left: 3px solid var(--c0); padding-left: 10px; margin: 4px 0 6px; }
.turn.told { border-color: var(--line); }
.turn b { color: var(--soft); font-size: 12px; font-weight: 600; }
.turn.told pre { color: var(--soft); }
details { padding: 12px 18px; } summary { cursor: pointer; font-weight: 600; }
details pre { font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono",
  monospace; overflow-x: auto; margin: 12px 0 4px; }
footer { margin-top: 36px; color: var(--faint); font-size: 13px; }
@media (max-width: 640px) { main { padding: 24px 14px 40px; } header h1 { font-size: 24px; }
  .tick { font-size: 15px; } }
@media print {
  :root { color-scheme: light; --bg: #fff; --card: #fff; --ink: #000; --soft: #444; --faint: #666;
    --line: #ccc; --grid: #e6e6e6; --good: #0b6b4b; --good-bg: #fff; --bad: #9c2a22;
    --bad-bg: #fff; --c0: #2563c9; --c1: #d9730d; --c2: #14936a; --c3: #8a56d8; --c4: #c8417f;
    --c5: #a58a0b; --c6: #0f8ea6; --c7: #9aa3b1; --c8: #8c5a3c; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  .charts { grid-template-columns: 1fr 1fr; }
  .tip, .cursor { display: none; } .tick { font-size: 14px; } td .key { margin-right: 4px; }
  td:first-child { white-space: nowrap; } .samples td:first-child { white-space: normal; }
  .samples { min-width: 0; } .samples pre { max-height: none; overflow: visible; }
  tr, .tile, .panel { break-inside: avoid; } h2 { break-after: avoid; }
}
"""

# Finds the x nearest to the pointer and shows what stands there. {x: px, l: label, s: series};
# a series has n(ame), c(lass), v(alues as text), and for lines y (px).
JS = """
for (const fig of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(fig.querySelector("script").textContent);
  const svg = fig.querySelector("svg"), tip = fig.querySelector(".tip");
  const cursor = fig.querySelector(".cursor"), rule = cursor.querySelector("path");
  const NS = "http://www.w3.org/2000/svg";
  const dots = data.s.map(s => {
    if (!s.y) return null;
    const dot = document.createElementNS(NS, "circle");
    dot.setAttribute("r", 4); dot.setAttribute("class", s.c); cursor.append(dot);
    return dot;
  });
  const hide = () => { tip.hidden = true; svg.classList.remove("hover"); };
  const el = (tag, text, cls) => {
    const e = document.createElement(tag);
    if (text) e.textContent = text;
    if (cls) e.className = cls;
    return e;
  };
  const show = event => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const px = (event.clientX - box.left) / scale;
    let best = 0;
    data.x.forEach((v, i) => { if (Math.abs(v - px) < Math.abs(data.x[best] - px)) best = i; });
    rule.setAttribute("transform", `translate(${data.x[best]},0)`);
    tip.replaceChildren(el("b", data.l[best]));
    data.s.forEach((s, i) => {
      const text = s.v[best], dot = dots[i];
      if (dot) {
        dot.style.display = text == null ? "none" : "";
        dot.setAttribute("cx", data.x[best]); dot.setAttribute("cy", s.y[best] ?? 0);
      }
      if (text == null) return;
      const row = el("div"), name = el("span");
      if (s.c) name.append(el("i", "", "key " + s.c));
      name.append(s.n);
      row.append(name, el("strong", text));
      tip.append(row);
    });
    tip.hidden = false; svg.classList.add("hover");
    const at = data.x[best] * scale, w = tip.offsetWidth;
    tip.style.left = (at + 14 + w > box.width ? Math.max(0, at - 14 - w) : at + 14) + "px";
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
"""
