// Memory: the peak of each stage, and the events of one stage's step.
const memory = { stage: facts.memory.fullest };
const MEMORY_COLORS = ["c0", "c4", "c3", "c6", "c1", "c9", "c5", "c10", "c7", "c8", "c8"];

function memoryColor(kind) {
  const base = color(MEMORY_COLORS[kind]);
  return kind === 10 ? faded(base, 0.55) : base;
}

function memoryPanel() {
  const data = facts.memory,
    kinds = data.kinds,
    stages = data.stages;
  const used = kinds.map((_, kind) => stages.some((stage) => stage.peak[kind] > 0));
  const fullest = stages[data.fullest];
  byId("memory-note").textContent =
    `${stages.length > 1 ? `Stage ${data.fullest} is the fullest. ` : ""}Its peak of ${bytes(fullest.peak_bytes)} is ` +
    `in the ${fullest.place}; a plan may take ${bytes(fullest.budget_bytes)} of the ${bytes(fullest.capacity_bytes)}.`;
  const place = byId("memory-peaks");
  place.hidden = stages.length < 2;
  const names = stages.map((_, stage) => `${stage}`);
  const limit = (key, title, dash) => ({
    type: "scatter",
    mode: "lines",
    name: title,
    x: names,
    y: stages.map((stage) => stage[key] / GIB),
    line: { color: color("budget"), dash, width: 2, shape: "hvh" },
    hovertemplate: `${title} %{y:.4g} GiB<extra></extra>`,
  });
  const peaks =
    stages.length < 2
      ? null
      : draw(
          "memory-peaks",
          `Peak memory of ${stages.length} stages by kind; the fullest takes ${bytes(fullest.peak_bytes)} of ` +
            `${bytes(fullest.budget_bytes)}`,
          [
            ...kinds
              .map((name, kind) => ({
                type: "bar",
                name,
                x: names,
                y: stages.map((stage) => stage.peak[kind] / GIB),
                marker: { color: memoryColor(kind) },
                showlegend: false,
                customdata: stages.map(
                  (stage, number) =>
                    `<b>stage ${number}: ${name}</b><br>${bytes(stage.peak[kind])} of a peak of ` +
                    `${bytes(stage.peak_bytes)}<br>${wrapped(stage.place)}`,
                ),
                hovertemplate: "%{customdata}<extra></extra>",
              }))
              .filter((_, kind) => used[kind]),
            limit("budget_bytes", "what a plan may take", "dash"),
          ],
          {
            xaxis: { title: { text: "pipeline stage" }, type: "category" },
            yaxis: { title: { text: "GiB of a device at its peak" }, rangemode: "tozero" },
          },
          300,
        );
  byId("memory-tables").replaceChildren(
    details(
      "Peaks as a table",
      table(
        "Memory at the peak of each stage",
        ["stage", ...kinds.filter((_, kind) => used[kind]), "peak", "may take", "where"],
        stages.map((stage, number) => [
          String(number),
          ...stage.peak.filter((_, kind) => used[kind]).map((size) => ({ number: bytes(size) })),
          { number: bytes(stage.peak_bytes) },
          { number: bytes(stage.budget_bytes) },
          stage.place,
        ]),
      ),
    ),
  );
  return Promise.all([peaks, memoryEvents(kinds)]);
}

function memoryEvents(kinds) {
  const stage = facts.memory.stages[memory.stage],
    count = stage.places.length;
  if (!count) {
    byId("memory-chart").replaceChildren(
      element("p", { class: "note" }, "With two weight versions the file has the peak alone, above."),
    );
    return null;
  }
  const x = stage.places.map((_, event) => event),
    totals = x.map((event) => stage.events.reduce((sum, column) => sum + column[event], 0));
  const top = totals.indexOf(Math.max(...totals));
  const hover = x.map(
    (event) =>
      `<b>${wrapped(stage.places[event])}</b><br>${bytes(totals[event])}` +
      kinds
        .map((name, kind) =>
          stage.events[kind][event] > 0.004 * totals[event] ? `<br>${name} ${bytes(stage.events[kind][event])}` : "",
        )
        .join(""),
  );
  const backward = stage.places.findIndex((place) => place.startsWith("weights") || place.startsWith("backward"));
  const words = (at, text) => ({
    x: at,
    y: 1,
    yref: "paper",
    yanchor: "top",
    text,
    showarrow: false,
    font: { size: 12, color: color("muted") },
  });
  return draw(
    "memory-chart",
    `Memory at ${count} events of stage ${memory.stage}; the most is ${bytes(totals[top])}, in the ` +
      `${stage.places[top]}; a plan may take ${bytes(stage.budget_bytes)}`,
    [
      ...kinds
        .map((name, kind) => ({
          type: "scatter",
          mode: "lines",
          stackgroup: "memory",
          name,
          x,
          y: stage.events[kind].map((size) => size / GIB),
          line: { width: 0, shape: "hvh" },
          fillcolor: memoryColor(kind),
          hoverinfo: "skip",
        }))
        .filter((trace) => trace.y.some((size) => size > 0)),
      {
        type: "scatter",
        mode: "lines",
        name: "all",
        x,
        y: totals.map((size) => size / GIB),
        line: { color: color("ink"), width: 1.2, shape: "hvh" },
        customdata: hover,
        hovertemplate: "%{customdata}<extra></extra>",
        showlegend: false,
      },
      {
        type: "scatter",
        mode: "markers",
        name: "peak",
        x: [top],
        y: [totals[top] / GIB],
        marker: { color: color("ink"), size: 9 },
        hoverinfo: "skip",
        showlegend: false,
      },
      {
        type: "scatter",
        mode: "lines",
        name: "what a plan may take",
        x: [x[0], x[count - 1]],
        y: [stage.budget_bytes / GIB, stage.budget_bytes / GIB],
        line: { color: color("budget"), dash: "dash", width: 2 },
        hovertemplate: `a plan may take ${bytes(stage.budget_bytes)}<extra></extra>`,
      },
      {
        type: "scatter",
        mode: "lines",
        name: "memory of the device",
        x: [x[0], x[count - 1]],
        y: [stage.capacity_bytes / GIB, stage.capacity_bytes / GIB],
        line: { color: color("budget"), width: 1.2 },
        hovertemplate: `the device has ${bytes(stage.capacity_bytes)}<extra></extra>`,
      },
    ],
    {
      hovermode: "x",
      xaxis: {
        title: { text: isNarrow() ? "events of the step, in order" : "events of the step at which memory may peak, in order" },
        showgrid: false,
        zeroline: false,
        ticks: "",
        nticks: 8,
      },
      yaxis: { title: { text: "GiB of a device" }, rangemode: "tozero" },
      annotations: backward > 0 ? [words(backward / 2, "forward"), words((backward + count) / 2, "backward, optimizer")] : [],
      shapes:
        backward > 0
          ? [
              {
                type: "line",
                x0: backward - 0.5,
                x1: backward - 0.5,
                y0: 0,
                y1: 1,
                yref: "paper",
                line: { color: color("muted"), width: 1, dash: "dot" },
              },
            ]
          : [],
    },
    isNarrow() ? 380 : 420,
  );
}

function memoryControls() {
  options(
    "memory-stage",
    facts.memory.stages.map((_, stage) => (facts.memory.stages.length > 1 ? `stage ${stage}` : "a device")),
    memory.stage,
  );
  byId("memory-stage").addEventListener("change", (event) => {
    memory.stage = Number(event.target.value);
    memoryEvents(facts.memory.kinds);
  });
}
panels.push(memoryPanel);
