// The cluster: devices in nodes under their links, coloured by their coordinate on an axis, and that axis' first group.
const cluster = { axis: 0 };

function coordinate(rank, axis) {
  return Math.floor(rank / axis.stride) % axis.size;
}

function shownNodes() {
  const data = facts.cluster,
    nodes = Math.ceil(data.size / data.node);
  if (data.size <= data.shown || nodes <= 8) return [...Array(nodes).keys()];
  const most = isNarrow() ? 4 : 8,
    axis = data.axes[cluster.axis],
    out = new Set([0]);
  for (let member = 1; member < axis.size && out.size < most - 1; member++)
    out.add(Math.floor((member * axis.stride) / data.node));
  for (let node = 1; out.size < most - 1; node++) out.add(node);
  return [...out, nodes - 1].sort((a, b) => a - b).filter((node, index, all) => node !== all[index - 1]);
}

function clusterPanel() {
  const data = facts.cluster,
    axis = data.axes[cluster.axis],
    shown = shownNodes(),
    nodes = Math.ceil(data.size / data.node);
  const columns = Math.min(shown.length, isNarrow() ? 2 : 4),
    across = data.node <= 2 ? data.node : Math.ceil(Math.sqrt(data.node / 2)) * 2,
    down = Math.ceil(data.node / across);
  const width = across + 1.4,
    height = down + 2.5,
    shapes = [],
    annotations = [],
    at = new Map(),
    outer = data.links.slice(1);
  const devices = { x: [], y: [], text: [], color: [], hover: [] };
  shown.forEach((node, index) => {
    const left = (index % columns) * width,
      top = -Math.floor(index / columns) * height;
    shapes.push({
      type: "rect",
      x0: left + 0.1,
      x1: left + width - 0.1,
      y0: top,
      y1: top - down - 1.15,
      line: { color: color("line"), width: 1.5 },
      fillcolor: faded(color("muted"), 0.06),
      layer: "below",
    });
    if (data.links.length)
      shapes.push({
        type: "line",
        x0: left + 0.4,
        x1: left + width - 0.4,
        y0: top - 0.85,
        y1: top - 0.85,
        line: { color: color("c6"), width: 4 },
        layer: "below",
      });
    if (nodes > 1)
      shapes.push({
        type: "line",
        x0: left + width / 2,
        x1: left + width / 2,
        y0: top,
        y1: top + 0.55,
        line: { color: color("c7"), width: 2 },
        layer: "below",
      });
    annotations.push({
      x: left + 0.35,
      y: top - 0.4,
      text: nodes > 1 ? `node ${node.toLocaleString("en-US")}` : "the node",
      showarrow: false,
      xanchor: "left",
      font: { size: 12, color: color("muted") },
    });
    for (let slot = 0; slot < data.node && node * data.node + slot < data.size; slot++) {
      const rank = node * data.node + slot,
        x = left + 1.2 + (slot % across),
        y = top - 1.55 - Math.floor(slot / across),
        own = coordinate(rank, axis);
      shapes.push({
        type: "line",
        x0: x,
        x1: x,
        y0: y,
        y1: top - 0.85,
        line: { color: faded(color("c6"), 0.5), width: 1 },
        layer: "below",
      });
      at.set(rank, [x, y]);
      devices.x.push(x);
      devices.y.push(y);
      devices.text.push(data.size <= 4096 ? String(rank) : "");
      devices.color.push(hue(own));
      devices.hover.push(
        `<b>rank ${rank.toLocaleString("en-US")}</b>, node ` +
          `${node.toLocaleString("en-US")}<br>${data.axes.map((each) => `${each.name} ${coordinate(rank, each)} of ${each.size}`).join("<br>")}`,
      );
    }
    if (index && node !== shown[index - 1] + 1)
      annotations.push({
        x: left - 0.02,
        y: top - down / 2 - 0.6,
        text: "…",
        showarrow: false,
        font: { size: 18, color: color("muted") },
      });
  });
  const rows = Math.ceil(shown.length / columns);
  if (nodes > 1)
    for (let row = 0; row < rows; row++)
      shapes.push({
        type: "line",
        x0: 0.4,
        x1: columns * width - 0.4,
        y0: 0.55 - row * height,
        y1: 0.55 - row * height,
        line: { color: color("c7"), width: 4 },
        layer: "below",
      });
  const group = [...Array(Math.min(axis.size, 100000)).keys()].map((member) => at.get(member * axis.stride)).filter(Boolean);
  const link = (each) =>
    `${each.name}, ${rate(each.bytes_per_second)} a device and direction, joins ${each.devices.toLocaleString("en-US")}`;
  const bus = (each, style) => ({
    type: "scatter",
    mode: "lines",
    name: link(each),
    x: [null],
    y: [null],
    line: { color: color(style), width: 4 },
    hoverinfo: "skip",
  });
  const many = nodes.toLocaleString("en-US");
  const part = `; ${shown.length} of ${many} nodes are drawn, those of the axis’ first group before others`;
  const over = axis.levels.map((level) => `${level.link} (${level.width} members)`).join(", then ") || "no link";
  const apart = `${axis.size} ranks, ${axis.stride.toLocaleString("en-US")} apart`;
  byId("cluster-note").textContent =
    `${plural(data.size, "device")}, ${data.node} in a node${shown.length < nodes ? part : ""}. ` +
    `Colours: the coordinate on ${axis.name}.` +
    (axis.size > 1 ? ` The line joins the first group of ${axis.name}: ${apart}, over ${over}.` : "");
  byId("cluster-tables").replaceChildren(
    table(
      "Mesh axes, outermost first",
      ["axis", "ranks", "apart", "what it shards", "over", "communication a step", "of it exposed", ""],
      data.axes.map((each) => [
        each.name,
        { number: each.size.toLocaleString("en-US") },
        { number: each.stride.toLocaleString("en-US") },
        each.shards.join(", ") || "nothing",
        each.levels.map((level) => `${level.link} × ${level.width}, ${rate(level.bytes_per_second)}`).join("; ") || "–",
        { number: seconds(each.seconds) },
        { number: seconds(each.exposed) },
        each.note,
      ]),
    ),
    details(
      "Links and devices",
      table(
        "Links, from the inside outwards",
        ["link", "joins", "kind", "bandwidth", "latency"],
        data.links.map((each) => [
          each.name,
          { number: each.devices.toLocaleString("en-US") },
          each.kind,
          { number: rate(each.bytes_per_second) },
          { number: seconds(each.latency_seconds) },
        ]),
      ),
      table(
        "Devices",
        ["device", "count", "memory"],
        data.devices.map((each) => [
          each.name,
          { number: each.count.toLocaleString("en-US") },
          { number: bytes(each.memory_bytes) },
        ]),
      ),
      ...(data.note ? [element("p", { class: "note" }, data.note)] : []),
    ),
  );
  return draw(
    "cluster-chart",
    byId("cluster-note").textContent,
    [
      ...data.links.slice(0, 1).map((each) => bus(each, "c6")),
      ...(nodes > 1 ? outer.map((each) => bus(each, "c7")) : []),
      ...(axis.size > 1
        ? [
            {
              type: "scatter",
              mode: "lines",
              name: `first group of ${axis.name}`,
              x: group.map(([x]) => x),
              y: group.map(([, y]) => y),
              line: { color: color("ink"), width: 2.4 },
              hoverinfo: "skip",
            },
          ]
        : []),
      {
        type: "scatter",
        mode: "markers+text",
        name: "device",
        x: devices.x,
        y: devices.y,
        text: isNarrow() && data.node > 4 ? [] : devices.text,
        textfont: { size: 10, color: color("mark") },
        marker: { symbol: "square", size: isNarrow() ? 13 : 24, color: devices.color, line: { color: color("panel"), width: 1 } },
        customdata: devices.hover,
        hovertemplate: "%{customdata}<extra></extra>",
        showlegend: false,
      },
    ],
    {
      shapes,
      annotations,
      dragmode: false,
      margin: { l: 4, r: 4, t: 8, b: 4 },
      xaxis: { visible: false, range: [-0.1, columns * width + 0.1], fixedrange: true },
      yaxis: { visible: false, range: [-rows * height + 0.8, 0.9], fixedrange: true },
    },
    Math.min(720, 70 + rows * height * (isNarrow() ? 32 : 36)),
  );
}

function clusterControls() {
  const axes = facts.cluster.axes,
    largest = axes.findIndex((axis) => axis.name !== "dp" && axis.size > 1);
  cluster.axis =
    largest >= 0
      ? axes.length - 1
      : Math.max(
          0,
          axes.findIndex((axis) => axis.size > 1),
        );
  if (axes[cluster.axis].size === 1)
    cluster.axis = Math.max(
      0,
      axes.findIndex((axis) => axis.size > 1),
    );
  options(
    "cluster-axis",
    axes.map((axis) => `${axis.name} (${axis.size})`),
    cluster.axis,
  );
  byId("cluster-axis").addEventListener("change", (event) => {
    cluster.axis = Number(event.target.value);
    clusterPanel();
  });
}
panels.push(clusterPanel);
