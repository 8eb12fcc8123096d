// What people write by hand takes on their software, and what single changes of the plan would take.
function pricesPanel() {
  const rows = facts.prices;
  byId("prices-note").textContent =
    "Usual configurations on the same cluster and batch, priced by the same evaluator with the constants of the " +
    "software that they run on, when the plan was made. Light bars: the same recipe on autopar’s own programs.";
  byId("prices-tables").replaceChildren(
    details(
      "Prices as a table",
      table(
        "Baselines",
        [
          "",
          "software",
          "step",
          "relative to this plan",
          "on our programs",
          "peak memory",
          "memory",
          "configuration",
          "published",
        ],
        rows.map((row) => [
          row.title,
          row.software || "our programs",
          { number: seconds(row.step_seconds) },
          { number: row.step_seconds ? digits(row.step_seconds / rows[0].step_seconds) : "–" },
          { number: seconds(row.own_step_seconds) },
          { number: bytes(row.peak_bytes) },
          row.memory,
          row.configuration,
          row.measured,
        ]),
      ),
    ),
    ...(rows.some((row) => row.reason)
      ? [list(rows.filter((row) => row.reason).map((row) => `${row.title}: ${row.reason}`))]
      : []),
  );
  const name = (row) => wrapped(row.title, isNarrow() ? 15 : 34) + (row.software ? `<br>${row.software}` : "");
  const hover = (row) => {
    const times =
      row.step_seconds && `${seconds(row.step_seconds)}, ${digits(row.step_seconds / rows[0].step_seconds)} × this plan`;
    return lined([
      `<b>${escaped(row.title)}</b>${row.software ? `, ${escaped(row.software)}` : ""}`,
      times || wrapped(row.problem || row.memory),
      `peak ${bytes(row.peak_bytes)}: ${row.memory}`,
      wrapped(row.configuration),
    ]);
  };
  const trace = (key, title, style) => ({
    type: "bar",
    orientation: "h",
    name: title,
    y: rows.map(name),
    x: rows.map((row) => row[key] || 0),
    customdata: rows.map(hover),
    hovertemplate: "%{customdata}<extra></extra>",
    text: rows.map((row) =>
      row[key] ? seconds(row[key]) : key === "step_seconds" ? (row.problem ? "impossible" : row.memory) : "",
    ),
    textposition: "outside",
    cliponaxis: false,
    ...style,
  });
  const own = rows.some((row) => row.own_step_seconds);
  return draw(
    "prices-chart",
    `Step of the plan and of ${rows.length - 1} configurations: ` +
      `${rows.map((row) => `${row.title} ${row.step_seconds ? seconds(row.step_seconds) : row.memory}`).join(", ")}`,
    [
      trace("step_seconds", "on its software", {
        marker: { color: rows.map((_, index) => color(index ? "c8" : "c0")) },
        showlegend: false,
      }),
      ...(own
        ? [trace("own_step_seconds", "on our programs", { marker: { color: faded(color("c0"), 0.35) }, showlegend: false })]
        : []),
    ],
    {
      barmode: "group",
      xaxis: {
        title: { text: "seconds of one step" },
        rangemode: "tozero",
        range: [
          0,
          (isNarrow() ? 1.35 : 1.18) * Math.max(...rows.map((row) => Math.max(row.step_seconds || 0, row.own_step_seconds || 0))),
        ],
      },
      yaxis: { autorange: "reversed" },
    },
    90 + (own ? 58 : 46) * rows.length,
  );
}

function whatIfPanel() {
  const rows = facts.what_if,
    step = facts.head.step_seconds,
    speed = facts.head.batch / step;
  byId("whatif-note").textContent =
    "The plan with one thing changed and all else as it is, evaluated without a new search: what a new search would " +
    "find is no slower.";
  byId("whatif-tables").replaceChildren(
    table(
      "Another memory: the fastest of what was solved or evaluated, by the memory that a device has to have",
      ["device memory from", "step", "difference", "peak", "plan", "fits this device"],
      facts.budgets.map((row) => [
        { number: bytes(row.device_bytes) },
        { number: seconds(row.step_seconds) },
        { number: signed(row.step_seconds / step - 1) },
        { number: bytes(row.peak_bytes) },
        row.name,
        row.fits ? "yes" : "no",
      ]),
    ),
    rows.length
      ? table(
          "One change, all else equal",
          ["change", "step", "difference", "examples per second", "difference ", "peak memory", "fits"],
          rows.map((row) => [
            row.name,
            { number: seconds(row.step_seconds) },
            { number: signed(row.step_seconds / step - 1) },
            { number: digits(row.examples_per_second, 4) },
            { number: signed(row.examples_per_second / speed - 1) },
            { number: bytes(row.peak_bytes) },
            row.fits ? "yes" : "no",
          ]),
        )
      : element("p", { class: "note" }, "Nothing can be changed alone here."),
    element(
      "p",
      { class: "note" },
      "A new search finds more, and takes longer than a page should; each of these adds a row: ",
      element("code", {}, "autopar report plan.json --what-if memory=160 --what-if nodes=16 --what-if tp=4"),
      ".",
    ),
  );
}
