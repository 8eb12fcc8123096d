// The timeline: bars of the visible window. Bars that would be narrower than a pixel are drawn together until one zooms in, the paler
// the more of the time between them is free.
const timeline = { view: 0, range: null };
const ACTION_COLORS = {
  F: "c0",
  B: "c1",
  I: "c1",
  W: "c5",
  reduction: "c4",
  optimizer: "c2",
  compute: "c6",
  "exposed communication": "c9",
  stall: "c8",
  transfer: "c4",
};
const KIND_WORDS = {
  compute: "compute",
  "exposed communication": "exposed communication of the model axes",
  stall: "waits for the data axis",
  transfer: "communication of the data axis (overlapped)",
};

function actionName(span) {
  return span.micro >= 0
    ? `${facts.timeline.actions[span.kind]} of micro-batch ${span.micro}`
    : facts.timeline.actions[span.kind];
}

// Rows of the chart: one a stage, or the streams of one stage.
function timelineRows() {
  const data = facts.timeline,
    unit = data.unit_seconds,
    many = data.stages.length;
  const chunks = data.calls.length > many;
  const actions = (stage) =>
    data.stages[stage].spans.map(([kind, chunk, micro, start, end, pass]) => {
      const span = { kind, chunk, micro, start: start * unit, end: end * unit, pass };
      return {
        ...span,
        text: micro < 0 ? "" : `${kind}${micro}`,
        words: `${actionName(span)}${chunks && chunk >= 0 ? `, chunk ${chunk}` : ""}`,
      };
    });
  if (many > 1 && timeline.view === 0) return data.stages.map((_, stage) => ({ name: `stage ${stage}`, spans: actions(stage) }));
  const stage = many > 1 ? timeline.view - 1 : 0,
    main = [],
    transfers = [],
    spans = actions(stage);
  for (const span of spans) {
    for (const [kind, start, end, call, what] of span.pass < 0 ? [] : data.passes[span.pass]) {
      const place = call >= 0 ? ` of ${data.calls[span.chunk][call]}` : "";
      const word = kind === "transfer" ? what : KIND_WORDS[kind] + (what ? ` ${what}` : "");
      (kind === "transfer" ? transfers : main).push({
        kind,
        start: span.start + start * unit,
        end: span.start + end * unit,
        text: "",
        words: `${word}${place}, ${actionName(span)}`,
      });
    }
    if (span.kind === "reduction" || span.kind === "optimizer") main.push({ ...span, text: "" });
  }
  for (const each of [main, transfers]) each.sort((a, b) => a.start - b.start);
  return [
    { name: "passes", spans },
    { name: "main stream", spans: main },
    ...(transfers.length ? [{ name: "data axis", spans: transfers }] : []),
  ];
}

// Spans of a row in the window [from, to]; runs of spans narrower than `least` become one.
function visible(spans, from, to, least) {
  const out = [];
  let run = null;
  for (const span of spans) {
    if (span.end < from || span.start > to || span.end <= span.start) continue;
    if (span.end - span.start >= least) {
      out.push(span);
      run = null;
      continue;
    }
    if (run && span.start - run.end < least && run.kind === span.kind) {
      run.end = Math.max(run.end, span.end);
      run.count += 1;
      run.busy += span.end - span.start;
      run.words = `${run.count} spans: ${run.first} … ${span.words}`;
    } else {
      run = { ...span, count: 1, busy: span.end - span.start, first: span.words, text: "" };
      out.push(run);
    }
  }
  return out;
}

function timelineEnd() {
  return Math.max(...facts.timeline.stages.map((stage) => stage.end)) * facts.timeline.unit_seconds;
}

function timelinePanel() {
  const data = facts.timeline,
    end = timelineEnd(),
    [from, to] = timeline.range || [0, end],
    rows = timelineRows();
  const width = Math.max(200, byId("timeline-chart").clientWidth - 90),
    groups = new Map();
  let shown = 0,
    all = 0;
  for (const row of rows) {
    all += row.spans.filter((span) => span.end > span.start).length;
    for (const span of visible(row.spans, from, to, (1.5 * (to - from)) / width)) {
      const key = KIND_WORDS[span.kind] || data.actions[span.kind];
      if (!groups.has(key))
        groups.set(key, { kind: span.kind, y: [], x: [], base: [], text: [], customdata: [], opacity: [], border: [] });
      const group = groups.get(key);
      shown += span.count || 1;
      const share = span.count ? span.busy / (span.end - span.start) : 1;
      group.opacity.push(0.2 + 0.8 * share);
      group.border.push(((span.end - span.start) / (to - from)) * width > 6 ? 0.7 : 0);
      group.y.push(row.name);
      group.base.push(span.start);
      group.x.push(span.end - span.start);
      group.text.push(((span.end - span.start) / (to - from)) * width > 24 ? span.text : "");
      group.customdata.push(
        `<b>${row.name}</b><br>${wrapped(span.words)}<br>${seconds(span.end - span.start)}, from ` +
          `${seconds(span.start)}${span.count > 1 ? `, busy ${percent(share, 2)} of it` : ""}`,
      );
    }
  }
  const traces = [...groups].map(([name, group]) => ({
    type: "bar",
    orientation: "h",
    name,
    y: group.y,
    x: group.x,
    base: group.base,
    text: group.text,
    customdata: group.customdata,
    marker: {
      color: color(ACTION_COLORS[group.kind]),
      opacity: group.opacity,
      line: { color: color("panel"), width: group.border },
    },
    textposition: "inside",
    insidetextanchor: "middle",
    textangle: 0,
    textfont: { size: 11, color: color("mark") },
    constraintext: "none",
    hovertemplate: "%{customdata}<extra></extra>",
  }));
  const stages = data.stages.length;
  byId("timeline-note").textContent =
    (stages > 1
      ? `${data.schedule}${data.synthesized ? " (a schedule that was synthesized for these stages)" : ""}: what each ` +
        `pipeline stage computes, and when; gaps are the bubble. One rank of a stage stands for all of them. `
      : "What the streams of one device do; all ranks do the same. ") +
    (data.flushed ? "" : "Two weight versions: one batch of many is drawn, and the next one begins before it ends. ") +
    "Drag to zoom, double-click for the whole step, or use the buttons.";
  byId("timeline-status").textContent =
    `${seconds(from)} to ${seconds(to)} of ${seconds(end)}: ${shown.toLocaleString("en-US")} of ` +
    `${all.toLocaleString("en-US")} spans.`;
  const place = byId("timeline-chart");
  const drawn = draw(
    "timeline-chart",
    `Timeline of ${stages} stages from ${seconds(from)} to ${seconds(to)}`,
    traces,
    {
      barmode: "overlay",
      bargap: rows.length > 20 ? 0.12 : 0.22,
      uirevision: `${timeline.view} ${from} ${to}`,
      xaxis: { title: { text: "seconds since the step began" }, range: [from, to], zeroline: false },
      yaxis: {
        type: "category",
        categoryarray: rows.map((row) => row.name),
        categoryorder: "array",
        autorange: false,
        range: [rows.length - 0.5, -0.5],
        fixedrange: true,
      },
    },
    110 + (rows.length > 12 ? 26 : rows.length > 5 ? 34 : 52) * rows.length,
  );
  if (!place.dataset.heard) {
    place.dataset.heard = "true";
    place.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) zoomTo(change["xaxis.range[0]"], change["xaxis.range[1]"]);
      else if (change["xaxis.autorange"]) zoomTo(0, end);
    });
    place.on("plotly_doubleclick", () => {
      zoomTo(0, timelineEnd());
      return false;
    });
  }
  return drawn;
}

function zoomTo(from, to) {
  const end = timelineEnd(),
    size = Math.min(end, Math.max(to - from, end * 1e-6)),
    begin = Math.min(Math.max(0, from), end - size);
  timeline.range = size >= end * 0.999999 ? null : [begin, begin + size];
  return timelinePanel();
}
function zoomBy(factor, shift) {
  const [from, to] = timeline.range || [0, timelineEnd()],
    middle = (from + to) / 2 + shift * (to - from),
    half = (factor * (to - from)) / 2;
  return zoomTo(middle - half, middle + half);
}
function timelineControls() {
  const many = facts.timeline.stages.length;
  options(
    "timeline-view",
    many > 1 ? ["all stages", ...facts.timeline.stages.map((_, stage) => `streams of stage ${stage}`)] : ["streams of a device"],
    0,
  );
  byId("timeline-view").addEventListener("change", (event) => {
    timeline.view = Number(event.target.value);
    timelinePanel();
  });
  for (const [name, factor, shift] of [
    ["in", 0.5, 0],
    ["out", 2, 0],
    ["left", 1, -0.5],
    ["right", 1, 0.5],
  ])
    byId(`timeline-${name}`).addEventListener("click", () => zoomBy(factor, shift));
  byId("timeline-reset").addEventListener("click", () => zoomTo(0, timelineEnd()));
  const stages = facts.step.ends.map((end, stage) => [
    String(stage),
    { number: String(facts.timeline.stages[stage].spans.length) },
    { number: seconds(end) },
  ]);
  byId("timeline-tables").replaceChildren(
    details("Stages as a table", table("Spans of each stage", ["stage", "spans", "ends after"], stages)),
  );
}
panels.push(timelinePanel);
