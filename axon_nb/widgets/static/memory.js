// What each rank's memory holds, as stacked bars. First pure functions (tests/js), then the view.

import { element, sayHere } from "./common.js";

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

// ---- what if -------------------------------------------------------------------------------------------------------

/** Whether a control has a meaning with these values, by name. */
export function applies(name, values) {
  if (name === "shard") return values.strategy === "hybrid_shard";
  return name !== "microbatches" || Number(values.pp) > 1;
}

/** What a kernel is asked: the values that differ from what is; numbers as they are typed. */
export function difference(fields, values) {
  const asked = {};
  for (const field of fields) {
    const value = values[field.name];
    if (applies(field.name, values) && String(value) !== String(field.now)) asked[field.name] = value;
  }
  return asked;
}

/** Words for what is done now, with the share of it. */
export function progressWords(doing, share) {
  return doing && share !== null && share !== undefined ? `${doing} (${Math.round(100 * share)} %)` : doing;
}

// ---- the view ------------------------------------------------------------------------------------------------------

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
    told.append(element("div", { class: "axon-view-muted" }, row.estimated.words));
  }
  const process = element("td", {}, makeBar(row.process, "process"), row.process.words);
  const line = element("tr", { "data-rank": row.rank, "aria-label": said(row) }, name, bars, told, process);
  if (row.flag) line.classList.add("axon-memory-flag");
  return line;
}

function makeControl(field, value) {
  let input;
  if (typeof field.now === "boolean") {
    input = element("input", { type: "checkbox" });
    input.checked = value;
  } else if (field.choices) {
    const options = field.choices.map(([own, label]) => element("option", { value: own }, label));
    input = element("select", {}, ...options);
    input.value = value;
  } else {
    input = element("input", { type: "number", min: "1", step: "1" });
    input.value = value;
  }
  input.name = field.name;
  return element("label", { class: "axon-memory-control", "data-name": field.name }, field.label, input);
}

function valueOf(input) {
  return input.type === "checkbox" ? input.checked : input.value;
}

/** The part of the panel where memory is asked for as it would be with other ranks, strategies, optimizers. */
function makeWhatIf(model) {
  const controls = element("div", { class: "axon-memory-controls", role: "group", "aria-label": "what if" });
  const reset = element("button", { type: "button", class: "axon-memory-reset" }, "as it is");
  const doing = element("span", { class: "axon-view-muted", role: "status" });
  const bar = element("progress", { max: "1", "aria-label": "simulation" });
  const error = element("div", { class: "axon-memory-error", role: "alert" });
  const heading = element("div", { class: "axon-memory-answer", "aria-live": "polite" });
  const legend = element("div", { class: "axon-memory-legend" });
  const table = element("table");
  const notes = element("div", { class: "axon-view-muted" });
  const line = element("div", { class: "axon-memory-doing" }, reset, bar, doing);
  const title = element("b", {}, "What if");
  const root = element("section", { class: "axon-memory-what-if" }, title, controls, line, error, heading, legend);
  root.append(element("div", { class: "axon-memory-scroll" }, table), notes);
  let drawn = "";

  const inputs = () => [...controls.querySelectorAll("input, select")];
  const values = () => Object.fromEntries(inputs().map((input) => [input.name, valueOf(input)]));
  const fields = () => model.get("what_if").fields ?? [];
  function showControls() {
    const chosen = values();
    for (const label of controls.children) label.hidden = !applies(label.dataset.name, chosen);
    reset.disabled = Object.keys(difference(fields(), chosen)).length === 0;
  }
  function ask() {
    showControls();
    const asked = difference(fields(), values());
    model.send({ op: "what_if", setup: Object.keys(asked).length ? asked : null });
  }
  controls.addEventListener("change", ask);
  reset.addEventListener("click", () => {
    drawn = "";
    build(fields(), true);
    ask();
  });

  /** Controls are made when what is has changed, and otherwise left to who uses them. */
  function build(own, fresh) {
    const now = JSON.stringify(own.map((field) => [field.name, field.now]));
    if (now === drawn) return;
    drawn = now;
    controls.replaceChildren(...own.map((field) => makeControl(field, fresh ? field.now : field.value)));
    showControls();
  }

  function draw() {
    const data = model.get("what_if");
    root.hidden = !Object.keys(data).length;
    if (root.hidden) return;
    build(data.fields, false);
    line.hidden = controls.hidden = !data.fields.length && !data.doing;
    reset.hidden = !data.fields.length;
    bar.hidden = data.share === null;
    if (data.share !== null) bar.value = data.share;
    doing.textContent = progressWords(data.doing, data.share);
    error.textContent = data.error;
    heading.textContent = data.heading;
    root.setAttribute("aria-busy", String(Boolean(data.doing)));
    legend.replaceChildren(...makeLegend(data.roles));
    table.replaceChildren(...data.bars.map(makeAnswer));
    notes.replaceChildren(...data.notes.map((note) => element("div", {}, note)));
  }
  return { root, draw, isEmpty: () => !fields().length };
}

function makeLegend(roles) {
  return roles.map((role) => element("span", {}, element("i", { class: `axon-memory-${role}` }), role));
}

function makeAnswer(bar) {
  const name = element("th", { scope: "row" }, bar.label);
  return element("tr", {}, name, element("td", {}, makeBar(bar, "measured")), element("td", {}, bar.words));
}

export default () => ({
  render({ model, el }) {
    const heading = element("b", { class: "axon-memory-heading" });
    const legend = element("div", { class: "axon-memory-legend" });
    const scroll = element("div", { class: "axon-memory-scroll", tabindex: "0", role: "region", "aria-label": "memory" });
    const notes = element("div", { class: "axon-view-muted" });
    const live = element("div", { class: "axon-view-muted", "aria-live": "polite" });
    const whatIf = makeWhatIf(model);
    const root = element("div", { class: "axon-view axon-memory" }, heading, legend, scroll, live, notes, whatIf.root);
    let before = [];
    el.append(root);

    function draw() {
      const data = model.get("content");
      heading.textContent = data.heading;
      legend.replaceChildren(
        ...makeLegend(data.roles),
        element("span", { class: "axon-view-muted" }, "| highest", " ┊ capacity"),
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

    model.on("change:content", draw);
    model.on("change:what_if", whatIf.draw);
    draw();
    whatIf.draw();
    // What is, is planned once somebody looks; after a reload the answer is there.
    if (!whatIf.root.hidden && whatIf.isEmpty()) model.send({ op: "what_if", setup: null });
    const unsay = sayHere(model, root);
    return () => {
      unsay();
      model.off("change:content", draw);
      model.off("change:what_if", whatIf.draw);
    };
  },
});
