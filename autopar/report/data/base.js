"use strict";
// What all panels share: numbers in words, the theme, tables, and one way to draw a chart.
const facts = JSON.parse(document.getElementById("facts").textContent);
const panels = [];
const GIB = 2 ** 30;

function byId(id) {
  return document.getElementById(id);
}
function digits(value, count = 3) {
  return Number(value.toPrecision(count)).toLocaleString("en-US", {
    maximumSignificantDigits: Math.max(count, Math.ceil(Math.log10(Math.abs(value) + 1))),
  });
}
function seconds(value, most = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  for (const [unit, size] of [
    ["s", 1],
    ["ms", 1e-3],
  ])
    if (Math.abs(value) >= size) return `${digits(value / size, most)} ${unit}`;
  return `${digits(value / 1e-6, most)} µs`;
}
function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [
    ["GiB", GIB],
    ["MiB", 2 ** 20],
    ["KiB", 1024],
  ])
    if (Math.abs(value) >= size) return `${digits(value / size)} ${unit}`;
  return `${value} B`;
}
function count(value) {
  for (const [word, size] of [
    ["trillion", 1e12],
    ["billion", 1e9],
    ["million", 1e6],
  ])
    if (value >= size) return `${digits(value / size, 4)} ${word}`;
  return value.toLocaleString("en-US");
}
function plural(number, word) {
  return `${number.toLocaleString("en-US")} ${word}${number === 1 ? "" : "s"}`;
}
function rate(value) {
  return `${digits(value / 1e9)} GB/s`;
}
function percent(value, count = 3) {
  return `${digits(100 * value, count)} %`;
}
function signed(value) {
  return `${value > 0 ? "+" : value < 0 ? "−" : ""}${digits(Math.abs(100 * value), 2)} %`;
}
function escaped(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
function hue(index) {
  return color(`c${index % 11}`);
}
function isNarrow() {
  return document.documentElement.clientWidth < 620;
}
function faded(hex, share) {
  return (
    hex +
    Math.round(255 * share)
      .toString(16)
      .padStart(2, "0")
  );
}

function element(tag, attributes = {}, ...children) {
  const out = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) out.setAttribute(name, value);
  for (const child of children) out.append(child);
  return out;
}

// A table; cells that are numbers or {number: text} are to the right.
function table(caption, header, rows) {
  const isNumber = (cell) => typeof cell === "object" && cell !== null && "number" in cell;
  const numeric = header.map((_, column) => rows.length > 0 && rows.every((row) => isNumber(row[column])));
  const cells = (row, tag) =>
    row.map((cell, column) =>
      element(
        tag,
        {
          ...(tag === "th" ? { scope: "col" } : {}),
          ...(numeric[column] ? { class: "number" } : {}),
        },
        isNumber(cell) ? cell.number : String(cell),
      ),
    );
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element(
      "table",
      {},
      element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...cells(header, "th"))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td")))),
    ),
  );
}
function details(summary, ...children) {
  return element("details", {}, element("summary", {}, summary), ...children);
}
function list(lines) {
  return element("ul", { class: "plain" }, ...lines.map((line) => element("li", {}, line)));
}
function options(select, names, chosen) {
  byId(select).replaceChildren(
    ...names.map((name, index) => element("option", { value: index, ...(index === chosen ? { selected: "" } : {}) }, name)),
  );
}

// Draws a chart in the page's colours and says to screen readers what it shows. Zoomed ranges stay (`uirevision`).
function draw(id, label, traces, layout, height) {
  const place = byId(id);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  const axis = {
    gridcolor: color("grid"),
    zerolinecolor: color("line"),
    linecolor: color("line"),
    automargin: true,
    tickfont: { size: 12 },
    title: { font: { size: 12.5 }, standoff: 8 },
  };
  const full = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    height,
    uirevision: id,
    dragmode: isNarrow() ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: color("ink") },
    margin: { l: 8, r: 10, t: 10, b: 40 },
    hovermode: "closest",
    barmode: "stack",
    bargap: 0.28,
    hoverlabel: { bgcolor: color("panel"), bordercolor: color("muted"), font: { color: color("ink"), size: 13 }, align: "left" },
    showlegend: false,
    ...layout,
  };
  for (const name of Object.keys(full)) {
    if (/^[xy]axis\d?$/.test(name))
      full[name] = { ...axis, ...full[name], title: { ...axis.title, ...(full[name].title || {}) } };
  }
  legend(place, traces);
  return Plotly.react(place, traces, full, {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
    doubleClick: "reset",
  });
}

// A legend of buttons above the chart, which show and hide a trace: it wraps, and the keyboard reaches it.
function legend(place, traces) {
  const old = byId(`${place.id}-legend`);
  if (old) old.remove();
  const entries = traces
    .map((trace, index) => [trace, index])
    .filter(([trace]) => trace.showlegend !== false && trace.visible !== false && trace.name);
  if (entries.length < 2) return;
  place.before(
    element(
      "ul",
      { class: "legend", id: `${place.id}-legend`, "aria-label": "Legend: shows and hides" },
      ...entries.map(([trace, index]) => {
        const marker = trace.marker || {},
          line = trace.line || {};
        const paint = trace.fillcolor || (typeof marker.color === "string" && marker.color) || line.color;
        const swatch = element("i", {
          class:
            trace.mode === "lines" && !trace.fillcolor
              ? `line ${line.dash || ""}`
              : trace.mode === "markers"
                ? `dot ${marker.symbol}`
                : "",
          style: `--paint:${paint}`,
        });
        const button = element(
          "button",
          { type: "button", "aria-pressed": String(trace.visible !== "legendonly") },
          swatch,
          trace.name,
        );
        button.addEventListener("click", () => {
          const shown = button.getAttribute("aria-pressed") !== "true";
          button.setAttribute("aria-pressed", String(shown));
          Plotly.restyle(place, { visible: shown ? true : "legendonly" }, [index]);
        });
        return element("li", {}, button);
      }),
    ),
  );
}

// The lines of a hover label, without those that say nothing.
function lined(lines) {
  return lines.filter(Boolean).join("<br>");
}

function wrapped(text, width = 64) {
  const lines = [""];
  for (const word of escaped(text).split(" ")) {
    if (lines[lines.length - 1].length + word.length > width) lines.push("");
    lines[lines.length - 1] += (lines[lines.length - 1] && " ") + word;
  }
  return lines.join("<br>");
}

// Every panel draws itself again when the colours or the width change.
async function drawAll() {
  for (const panel of panels) await panel();
}
async function start() {
  await drawAll();
  document.documentElement.dataset.ready = "true";
  byId("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // plotly.js measures texts in it
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let narrow = isNarrow();
  addEventListener("resize", () => {
    if (narrow !== isNarrow()) {
      narrow = isNarrow();
      drawAll();
    }
  });
}
