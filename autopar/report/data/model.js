// The model: its calls by stage, and the operations of one block by how they are sharded. (A hover label that is higher than its
// chart is not shown at all, so that labels have few lines.)
const model = { block: 0, axis: 0 };

function few(lines, most, what) {
  return lines.length <= most + 1 ? lines : [...lines.slice(0, most), `${lines.length - most} more ${what} in the table below`];
}

function modelPanel() {
  const data = facts.model,
    stages = facts.step.ends.length;
  byId("model-note").textContent =
    `Each call of a block in order${stages > 1 ? ", by pipeline stage" : ""}, equal blocks in one colour; below, the ` +
    `operations of one block, a row a module, coloured by how an axis shards the result. Hover for placements and ` +
    `source lines.`;
  const groups = data.blocks.map((block, index) => ({
    block,
    index,
    calls: data.calls.map((call, place) => [...call, place]).filter((call) => call[1] === index),
  }));
  const position = data.calls.map(() => 0),
    seen = {};
  data.calls.forEach((call, place) => {
    position[place] = seen[call[2]] = (seen[call[2]] === undefined ? -1 : seen[call[2]]) + 1;
  });
  const calls = draw(
    "model-calls",
    `${data.calls.length} calls of ${data.blocks.length} distinct blocks: ` +
      `${data.blocks.map((block) => `${block.count} of ${block.path}`).join(", ")}`,
    groups.map(({ block, index, calls }) => ({
      type: "bar",
      orientation: "h",
      name: block.name + (block.count > 1 ? ` × ${block.count}` : ""),
      y: calls.map((call) => (stages > 1 ? `stage ${call[2]}` : "calls")),
      base: calls.map((call) => position[call[3]]),
      x: calls.map(() => 1),
      marker: { color: hue(index), line: { color: color("panel"), width: data.calls.length > 200 ? 0 : 1 } },
      customdata: calls.map(
        (call) =>
          `<b>${escaped(call[0])}</b><br>${block.name}, ${block.state}<br>${few(
            block.parameters.map(([path, shape, place]) => `${escaped(path)} [${shape}] ${place}`),
            3,
            "parameters",
          ).join("<br>")}`,
      ),
      hovertemplate: "%{customdata}<extra></extra>",
    })),
    {
      barmode: "overlay",
      bargap: 0.2,
      xaxis: {
        title: { text: stages > 1 ? "calls of the stage, in order" : "calls, in order" },
        range: [0, 1 + Math.max(...position)],
        zeroline: false,
        showgrid: false,
      },
      yaxis: {
        type: "category",
        categoryarray: stages > 1 ? facts.step.ends.map((_, stage) => `stage ${stage}`) : ["calls"],
        categoryorder: "array",
        autorange: "reversed",
      },
    },
    Math.max(190, 110 + (stages > 12 ? 22 : 40) * stages),
  );
  return Promise.all([calls, blockPanel()]);
}

function blockPanel() {
  const data = facts.model,
    block = data.blocks[model.block],
    axis = data.axes[model.axis],
    operations = block.operations;
  byId("model-state").textContent = `${block.path}${block.count > 1 ? `, ${block.count} times` : ""}: ${block.state}.`;
  const rows = [...new Set(operations.map((operation) => operation.module || "(block)"))],
    words = [...new Set(operations.map((operation) => operation.sharding[model.axis] || "one rank"))].sort();
  const whole = words.indexOf("whole on every rank");
  if (whole >= 0) words.push(...words.splice(whole, 1));
  const hover = (operation) => {
    const place = operation.module || block.name;
    const operands = operation.operands.map((text) => `in&nbsp; ${escaped(text)}`);
    const results = operation.results.map((text) => `out ${escaped(text)}`);
    const [forward, backward] = operation.seconds.map((value) => seconds(value));
    return lined([
      `<b>${escaped(operation.name)}</b> ${escaped(operation.op)}`,
      escaped(operation.source ? `${place} · ${operation.source}` : place),
      ...few(operands, 5, "operands"),
      ...few(results, 3, "results"),
      ...data.axes.map((name, index) => `${name}: ${operation.sharding[index]}`),
      `forward ${forward}, backward ${backward} a call`,
      operation.more.join(", "),
    ]);
  };
  const short = (text) => (isNarrow() && text.length > 16 ? `…${text.slice(-15)}` : text);
  byId("model-tables").replaceChildren(
    details(
      "These operations as a table",
      table(
        `Operations of ${block.path}`,
        ["operation", "what", "module", "source", "operands", "results", ...data.axes],
        operations.map((each) => [
          each.name,
          each.op,
          each.module,
          each.source,
          each.operands.join(", "),
          each.results.join(", "),
          ...each.sharding,
        ]),
      ),
    ),
    details(
      "Parameters as they are stored",
      table(
        `Parameters of ${block.path}`,
        ["parameter", "shape", `placement on ${data.axes.join(", ") || "one rank"}`],
        block.parameters,
      ),
    ),
  );
  return draw(
    "model-chart",
    `${operations.length} operations of ${block.path} by how ${axis || "one rank"} shards them: ${words.join(", ")}`,
    words.map((word, index) => {
      const chosen = operations
        .map((operation, place) => [operation, place])
        .filter(([operation]) => (operation.sharding[model.axis] || "one rank") === word);
      return {
        type: "bar",
        orientation: "h",
        name: word,
        y: chosen.map(([operation]) => short(operation.module || "(block)")),
        base: chosen.map(([, place]) => place),
        x: chosen.map(() => 1),
        marker: {
          color: word === "whole on every rank" ? faded(color("c8"), 0.55) : hue(index),
          line: { color: color("panel"), width: 1 },
        },
        customdata: chosen.map(([operation]) => hover(operation)),
        hovertemplate: "%{customdata}<extra></extra>",
      };
    }),
    {
      barmode: "overlay",
      bargap: 0.18,
      xaxis: { title: { text: "operations, in order" }, range: [0, operations.length], zeroline: false, showgrid: false },
      yaxis: { type: "category", categoryarray: rows.map(short), categoryorder: "array", autorange: "reversed" },
    },
    Math.max(320, 130 + 26 * rows.length),
  );
}

function modelControls() {
  const data = facts.model;
  model.block = data.blocks.reduce((best, block, index) => (block.count > data.blocks[best].count ? index : best), 0);
  options(
    "model-block",
    data.blocks.map((block) => `${block.path}${block.count > 1 ? ` × ${block.count}` : ""}`),
    model.block,
  );
  const last = data.axes.findIndex((name) => name !== "dp");
  model.axis = Math.max(0, last);
  options("model-axis", data.axes.length ? data.axes : ["one rank"], model.axis);
  byId("model-block").addEventListener("change", (event) => {
    model.block = Number(event.target.value);
    blockPanel();
  });
  byId("model-axis").addEventListener("change", (event) => {
    model.axis = Number(event.target.value);
    blockPanel();
  });
}
panels.push(modelPanel);
