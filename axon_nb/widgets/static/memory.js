// What each rank's memory holds, as stacked bars. First pure functions (tests/js), then the view.

import { element } from "./common.js";

// ---- lengths and words ---------------------------------------------------------------------------------------------

/** A length for CSS; none is beyond the whole. */
export function percent(part) {
  return `${(100 * Math.max(0, Math.min(1, part))).toFixed(2)}%`;
}

/** What a reader is told of a rank: its bars, and why it is flagged. */
export function said(row) {
  const bars = [row.measured, row.estimated, row.process].filter(Boolean).map((bar) => bar.words);
  return `rank ${row.rank}: ${[...bars, row.flag].filter(Boolean).join("; ")}`;
}

/** Ranks that are flagged and were not before. */
export function news(before, rows) {
  const known = new Set(before.filter((row) => row.flag).map((row) => row.rank));
  return rows.filter((row) => row.flag && !known.has(row.rank)).map((row) => `rank ${row.rank}: ${row.flag}`);
}

// ---- the view ------------------------------------------------------------------------------------------------------

const HERE_MS = 5000;

function makeBar(bar, kind) {
  const root = element("div", { class: `axon-memory-bar axon-memory-${kind}`, role: "img", "aria-label": bar.words });
  root.title = bar.words;
  for (const [role, part] of bar.segments) {
    const segment = element("i", { class: `axon-memory-${role}`, "data-role": role });
    segment.style.width = percent(part);
    root.append(segment);
  }
  for (const mark of ["peak", "capacity"]) {
    if (bar[mark] === null) continue;
    const line = element("div", { class: `axon-memory-${mark}` });
    line.style.left = percent(bar[mark]);
    root.append(line);
  }
  return root;
}

function makeRow(row) {
  const name = element("th", { scope: "row" }, row.flag ? `${row.rank} ⚠` : String(row.rank));
  const bars = element("td", {}, makeBar(row.measured, "measured"));
  const told = element("td", {}, element("div", {}, row.measured.words));
  if (row.estimated) {
    bars.append(makeBar(row.estimated, "estimated"));
    told.append(element("div", { class: "axon-memory-muted" }, row.estimated.words));
  }
  const process = element("td", {}, makeBar(row.process, "process"), row.process.words);
  const line = element("tr", { "data-rank": row.rank, "aria-label": said(row) }, name, bars, told, process);
  if (row.flag) line.classList.add("axon-memory-flag");
  return line;
}

export default () => ({
  render({ model, el }) {
    const heading = element("b", { class: "axon-memory-heading" });
    const legend = element("div", { class: "axon-memory-legend" });
    const scroll = element("div", { class: "axon-memory-scroll", tabindex: "0", role: "region", "aria-label": "memory" });
    const notes = element("div", { class: "axon-memory-muted" });
    const live = element("div", { class: "axon-memory-muted", "aria-live": "polite" });
    const root = element("div", { class: "axon-memory" }, heading, legend, scroll, live, notes);
    let before = [];
    el.append(root);

    function draw() {
      const data = model.get("content");
      heading.textContent = data.heading;
      legend.replaceChildren(
        ...data.roles.map((role) => element("span", {}, element("i", { class: `axon-memory-${role}` }), role)),
        element("span", { class: "axon-memory-muted" }, "| highest", " ┊ capacity"),
      );
      const head = element("tr", {}, ...data.titles.map((title) => element("th", { scope: "col" }, title)));
      const top = scroll.scrollTop;
      const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...data.rows.map(makeRow)));
      scroll.replaceChildren(table);
      scroll.scrollTop = top;
      const fresh = news(before, data.rows);
      if (fresh.length) live.textContent = fresh.join(" ");
      else if (!data.rows.some((row) => row.flag)) live.textContent = "";
      before = data.rows;
      notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
      root.dataset.updates = String(data.updates);
    }

    const here = () => {
      if (!document.hidden && root.isConnected) model.send({ op: "here" });
    };
    const timer = setInterval(here, HERE_MS);
    document.addEventListener("visibilitychange", here);
    model.on("change:content", draw);
    draw();
    // Only now is the root part of the page.
    requestAnimationFrame(here);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", here);
      model.off("change:content", draw);
    };
  },
});
