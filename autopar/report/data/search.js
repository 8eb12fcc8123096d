// The search: time against memory, the frontier, and the bound; points that are known by their bound alone in a strip of their own.
const STATUS_COLORS = { OPTIMAL: "c2", FEASIBLE: "c0", PRUNED: "c8", "NOT TRIED": "c5", INFEASIBLE: "c9" };
const STATUS_WORDS = {
  OPTIMAL: "solved to the end",
  FEASIBLE: "solved, perhaps not the best of its point",
  PRUNED: "closed by bound",
  "NOT TRIED": "not tried",
  INFEASIBLE: "too large for the memory",
};

const LOG_TICKS = [1e-3, 1e-2, 0.1, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 1e5, 1e6];

function searchPanel() {
  const data = facts.search,
    solved = data.points.filter((point) => point[3] !== null && point[4] !== null);
  const others = data.points.filter((point) => (point[3] === null || point[4] === null) && point[2] !== null);
  const [chosenBytes, chosenSeconds] = data.chosen,
    changes = facts.what_if.filter((row) => !row.name.includes("devices"));
  const count = (status) => data.points.filter((point) => point[1] === status).length;
  byId("search-note").textContent = data.points.length
    ? `${plural(data.points.length, "point")} of mesh, micro-batches, state groups and schedule: ${Object.keys(STATUS_WORDS)
        .filter(count)
        .map((status) => `${count(status)} ${STATUS_WORDS[status]}`)
        .join(", ")}.` + (data.gap ? ` The plan is at most ${percent(data.gap)} above the lower bound.` : "")
    : "";
  byId("search-tables").replaceChildren(
    ...(data.fastest
      ? [
          element(
            "p",
            { class: "note" },
            `Fastest by prediction, and too near to tell apart from the chosen one: ${data.fastest[0]}, ` +
              `${seconds(data.fastest[1])}.`,
          ),
        ]
      : []),
    list(data.missing),
    ...(data.points.length
      ? [
          details(
            "All points as a table",
            table(
              "Points of the search",
              ["point", "status", "lower bound", "step", "peak memory", "why"],
              data.points.map(([mesh, status, bound, step, size, reason]) => [
                mesh,
                STATUS_WORDS[status] || status,
                { number: seconds(bound) },
                { number: seconds(step) },
                { number: bytes(size) },
                reason,
              ]),
            ),
          ),
        ]
      : []),
  );
  const hover = ([mesh, status, bound, step, size, reason]) =>
    lined([
      `<b>${wrapped(mesh)}</b>`,
      step !== null && `${seconds(step)}, ${bytes(size)}`,
      bound !== null && `lower bound ${seconds(bound)}`,
      STATUS_WORDS[status] || status,
      reason && wrapped(reason),
    ]);
  const points = (rows, symbol, x, y, more) =>
    [...new Set(rows.map((row) => row[1]))].map((status) => {
      const own = rows.filter((row) => row[1] === status);
      return {
        type: "scatter",
        mode: "markers",
        name: STATUS_WORDS[status] || status,
        x: own.map(x),
        y: own.map(y),
        marker: { symbol, size: 9, color: color(STATUS_COLORS[status] || "c3"), line: { color: color("panel"), width: 1 } },
        customdata: own.map(hover),
        hovertemplate: "%{customdata}<extra></extra>",
        ...more,
      };
    });
  const strip = others.length > 0,
    width = isNarrow() ? 0.72 : 0.8,
    jitter = new Map(others.map((point, index) => [point, 0.1 + 0.8 * ((index * 0.618034) % 1)]));
  const ys = [chosenSeconds, ...solved.map((point) => point[3]), ...others.map((point) => point[2]), data.bound_seconds].filter(
    (value) => value,
  );
  const xs = [chosenBytes, ...solved.map((point) => point[4]), ...changes.map((row) => row.peak_bytes), facts.head.budget_bytes]
    .filter((value) => value)
    .map((value) => value / GIB);
  const log = Math.max(...xs) / Math.min(...xs) > 4,
    scaled = (value) => (log ? Math.log10(value) : value);
  const wide = Math.max(...ys) / Math.min(...ys) > 3,
    span = [Math.min(...xs), Math.max(...xs)],
    line = log
      ? [0.85 * span[0], 1.15 * span[1]]
      : [Math.max(0, span[0] - 0.08 * (span[1] - span[0])), span[1] + 0.05 * (span[1] - span[0])];
  const frontier =
    data.frontier.length > 1
      ? [
          {
            type: "scatter",
            mode: "lines",
            name: "frontier",
            x: data.frontier.map(([size]) => size / GIB),
            y: data.frontier.map(([, step]) => step),
            line: { color: color("c0"), width: 1.5, shape: "hv" },
            hoverinfo: "skip",
          },
        ]
      : [];
  return draw(
    "search-chart",
    `Time against memory of ${solved.length} solved points; the chosen plan takes ${seconds(chosenSeconds)} and ` +
      `${bytes(chosenBytes)}; the lower bound is ${seconds(data.bound_seconds)}`,
    [
      ...frontier,
      ...points(
        solved,
        "circle",
        (point) => point[4] / GIB,
        (point) => point[3],
        {},
      ),
      {
        type: "scatter",
        mode: "markers",
        name: "one change, all else equal",
        x: changes.map((row) => row.peak_bytes / GIB),
        y: changes.map((row) => row.step_seconds),
        visible: !changes.length ? false : solved.length > 3 ? "legendonly" : true,
        marker: { symbol: "triangle-up-open", size: 9, color: color("c3"), line: { width: 1.6 } },
        customdata: changes.map(
          (row) =>
            `<b>${escaped(row.name)}</b><br>${seconds(row.step_seconds)}, ` +
            `${bytes(row.peak_bytes)}<br>${row.fits ? "fits" : "does not fit"}; evaluated, not solved`,
        ),
        hovertemplate: "%{customdata}<extra></extra>",
      },
      {
        type: "scatter",
        mode: "markers",
        name: "this plan",
        x: [chosenBytes / GIB],
        y: [chosenSeconds],
        marker: { symbol: "star", size: 17, color: color("c1"), line: { color: color("panel"), width: 1 } },
        customdata: [`<b>this plan</b><br>${wrapped(facts.head.plan)}<br>${seconds(chosenSeconds)}, ${bytes(chosenBytes)}`],
        hovertemplate: "%{customdata}<extra></extra>",
      },
      ...(data.bound_seconds
        ? [
            {
              type: "scatter",
              mode: "lines",
              name: "lower bound of every plan",
              x: line,
              y: [data.bound_seconds, data.bound_seconds],
              line: { color: color("ink"), dash: "dash", width: 1.6 },
              hovertemplate: `no plan of the search takes less than ${seconds(data.bound_seconds)}<extra></extra>`,
            },
          ]
        : []),
      {
        type: "scatter",
        mode: "lines",
        name: "memory that a plan may take",
        x: [facts.head.budget_bytes / GIB, facts.head.budget_bytes / GIB],
        y: [Math.min(...ys) * 0.96, Math.max(...ys) * 1.02],
        line: { color: color("budget"), dash: "dash", width: 1.6 },
        hovertemplate: `a plan may take ${bytes(facts.head.budget_bytes)}<extra></extra>`,
      },
      ...(strip
        ? points(
            others,
            "line-ew-open",
            (point) => jitter.get(point),
            (point) => point[2],
            { xaxis: "x2" },
          ).map((trace) => ({
            ...trace,
            showlegend: !solved.some((point) => (STATUS_WORDS[point[1]] || point[1]) === trace.name),
            marker: { ...trace.marker, size: 10, line: { width: 2 } },
          }))
        : []),
    ],
    {
      xaxis: {
        title: { text: `GiB of a device at its peak${log ? ", logarithmic" : ""}` },
        type: log ? "log" : "linear",
        ...(log ? { tickvals: LOG_TICKS, ticktext: LOG_TICKS.map(String) } : {}),
        domain: [0, strip ? width : 1],
        range: line.map(scaled),
        zeroline: false,
      },
      yaxis: {
        title: { text: "seconds of one step" + (wide ? ", logarithmic" : "") },
        type: wide ? "log" : "linear",
        zeroline: false,
      },
      ...(strip
        ? {
            xaxis2: {
              title: { text: isNarrow() ? "bounds" : "lower bounds alone" },
              domain: [width + 0.03, 1],
              range: [0, 1],
              showticklabels: false,
              showgrid: false,
              zeroline: false,
            },
          }
        : {}),
    },
    isNarrow() ? 460 : 470,
  );
}
panels.push(searchPanel, pricesPanel, whatIfPanel);
timelineControls();
memoryControls();
modelControls();
clusterControls();
start();
