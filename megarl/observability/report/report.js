// Charts that share one place: a reader chooses which is shown.
for (const place of document.querySelectorAll(".choice")) {
  const charts = [...place.children], select = document.createElement("select");
  charts.forEach((chart, i) => select.add(new Option(chart.dataset.choice, i)));
  const choose = () => charts.forEach((chart, i) => { chart.hidden = i !== Number(select.value); });
  select.setAttribute("aria-label", "what is drawn");
  select.onchange = choose;
  place.prepend(select);
  choose();
}
// Finds the x nearest to the pointer and shows what stands there. {x: px, l: label, s: series};
// a series has n(ame), c(lass), v(alues as text), and for lines y (px).
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
