// The head, and where each second goes.
const STEP_COLORS = {
  compute: "c0",
  "waits for the data axis": "c4",
  "pipeline bubble": "c8",
  optimizer: "c2",
  "exposed communication": "c1",
};
const EXPOSED_COLORS = ["c1", "c9", "c5", "c7", "c3"];

function partColor(name, index) {
  return color(STEP_COLORS[name] || EXPOSED_COLORS[index % EXPOSED_COLORS.length]);
}

function headPanel() {
  const head = facts.head;
  byId("title").textContent = head.title;
  byId("subtitle").textContent =
    `${head.plan}. ${head.devices.toLocaleString("en-US")} × ${head.device}, ${count(head.parameters)} parameters, a ` +
    `batch of ${head.batch.toLocaleString("en-US")}` +
    (head.sequence ? ` sequences of ${head.sequence.toLocaleString("en-US")} tokens` : " examples") +
    (head.micro_batches > 1 ? ` in ${head.micro_batches} micro-batches.` : ".");
  const bound = head.lower_bound_seconds;
  const measured = facts.measured;
  const figures = [
    [
      "Step",
      seconds(head.step_seconds, 4),
      measured
        ? `measured ${seconds(measured.step_seconds)}`
        : bound
          ? `no plan of the search takes less than ${seconds(bound)}`
          : "predicted",
    ],
    head.tokens_per_second_per_device
      ? ["Tokens", digits(head.tokens_per_second_per_device), "per second and device"]
      : ["Examples", digits(head.batch / head.step_seconds), "per second, all devices"],
    ["Of the peak FLOP/s", percent(head.mfu), `${digits(head.tflops_per_device)} TFLOP/s per device (MFU)`],
    ["Memory at the peak", bytes(head.peak_bytes), `of ${bytes(head.budget_bytes)} that a plan may take`],
  ];
  byId("figures").replaceChildren(
    ...figures.map(([name, value, more]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, more))),
    ),
  );
  byId("reasons").replaceChildren(...head.reasons.map((line) => element("p", {}, line)));
  byId("contents").replaceChildren(
    ...[...document.querySelectorAll("section")].map((each) =>
      element(
        "li",
        {},
        element(
          "a",
          { href: `#${each.id}` },
          {
            step: "Seconds",
            timeline: "Timeline",
            memory: "Memory",
            model: "Model",
            cluster: "Cluster",
            search: "Search",
            prices: "By hand",
            whatif: "What if",
          }[each.id],
        ),
      ),
    ),
  );
  byId("footer").textContent =
    "Every number is the evaluator’s, computed from the plan’s file; see docs/report.md. Charts by plotly.js (MIT). " +
    "This page loads nothing from a network.";
}

function stepPanel() {
  const step = facts.step,
    measured = facts.measured,
    stages = step.ends.length;
  const name = (stage) => (stages > 1 ? `stage ${stage}${stage === step.bottleneck ? " ◂" : ""}` : "predicted");
  const measuredName = (stage) => (stages > 1 ? `stage ${stage}, measured` : "measured");
  const rows = [];
  for (let stage = 0; stage < stages; stage++) rows.push(name(stage), ...(measured ? [measuredName(stage)] : []));
  const bar = (parts, rowOf, shown, what) =>
    parts.map((part, index) => ({
      type: "bar",
      orientation: "h",
      name: part.name,
      legendgroup: part.name,
      showlegend: shown(part.name) && Math.max(...part.seconds) > 1e-3 * step.step_seconds,
      y: part.seconds.map((_, stage) => rowOf(stage)),
      x: part.seconds,
      marker: { color: partColor(part.name, index - 1), line: { width: 0 } },
      text: part.seconds.map((value, stage) => (value > 0.07 * step.step_seconds ? percent(value / step.ends[stage], 2) : "")),
      textposition: "inside",
      insidetextanchor: "middle",
      textangle: 0,
      textfont: { color: color("mark"), size: 12 },
      customdata: part.seconds.map(
        (value, stage) =>
          `<b>${rowOf(stage).replace(" ◂", "")}: ${part.name}</b><br>${seconds(value)}, ` +
          `${percent(value / what(stage))} of its step`,
      ),
      hovertemplate: "%{customdata}<extra></extra>",
    }));
  const names = step.parts.map((part) => part.name);
  const traces = [
    ...bar(
      step.parts,
      name,
      () => true,
      (stage) => step.ends[stage],
    ),
    ...(measured
      ? bar(
          measured.parts,
          measuredName,
          (each) => !names.includes(each),
          () => measured.step_seconds,
        )
      : []),
  ];
  byId("step-note").textContent =
    (stages > 1
      ? `Seconds of each pipeline stage in one step; the parts of a stage add up to its end. Stage ${step.bottleneck} ` +
        `(◂) ends last and sets the step. `
      : "Seconds of one device in one step; the parts add up to the step. ") +
    (step.shared_cores
      ? "Ranks share processor cores here: their compute is that of all at work, and a rank that works alone is " +
        "faster, so that parts may exceed the end. "
      : "") +
    (measured
      ? `Measured: the mean of ${measured.steps} steps on ${measured.device}; a measured wait is not divided by axis.`
      : 'No measured step: save one with parallel.report().save("measured.json") beside the plan, and it stands here too.');
  const label = `Seconds of a step. ${step.parts.map((part) => `${part.name} ${seconds(part.seconds[step.bottleneck])}`).join(", ")}`;
  byId("step-tables").replaceChildren(
    table(
      "Why the step is not faster: from the model’s FLOPs at the peak of the devices to the step",
      ["what", "seconds", "of the step"],
      [["the model’s FLOPs at the peak", facts.head.ideal_seconds], ...facts.head.losses].map(([what, value]) => [
        what,
        { number: seconds(value) },
        { number: percent(value / step.step_seconds) },
      ]),
    ),
    ...(step.axes.length
      ? [
          table(
            "Communication by mesh axis, one step" + (stages > 1 ? `, stage ${step.bottleneck}` : ""),
            ["axis", "overlapped or exposed", "of it exposed beside compute"],
            step.axes.map((row) => [
              row.axis,
              { number: seconds(row.seconds) },
              { number: row.axis === "dp" ? `${seconds(row.exposed)} and the waits for the data axis` : seconds(row.exposed) },
            ]),
          ),
        ]
      : []),
    ...(measured
      ? [
          element("h3", {}, "What is off"),
          list(measured.advice.length ? measured.advice : ["Nothing: the step is as it was predicted."]),
          details(
            "Measured beside predicted, in full",
            ...measured.tables.map((each) => table(each.title, each.header, each.rows)),
          ),
        ]
      : []),
    details(
      "These seconds as a table",
      table(
        "Seconds of one step",
        ["stage", ...names, "ends after"],
        step.ends.map((end, stage) => [
          `${stage}`,
          ...step.parts.map((part) => ({ number: seconds(part.seconds[stage]) })),
          { number: seconds(end) },
        ]),
      ),
    ),
  );
  return draw(
    "step-chart",
    label,
    traces,
    {
      xaxis: { title: { text: "seconds of one step" }, rangemode: "tozero" },
      yaxis: { type: "category", categoryarray: rows, categoryorder: "array", autorange: "reversed", ticks: "" },
    },
    120 + (rows.length > 12 ? 24 : 40) * rows.length,
  );
}

panels.push(headPanel, stepPanel);
