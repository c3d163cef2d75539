// Drawing: pictures, maps over the patches, bars and curves.

const COLOUR = {softmax: "var(--softmax)", symmetric: "var(--symmetric)", rpc: "var(--rpc)"};      // of page.css
const TITLE = {softmax: "softmax", symmetric: "symmetric", rpc: "RPC"};
const STOPS = [[0, 0, 4], [81, 18, 124], [183, 55, 121], [252, 137, 97], [252, 253, 191]];

function colour(x) {                                  // from 0 (black) by violet and orange to 1 (pale yellow)
  const at = Math.min(Math.max(x, 0), 0.9999) * (STOPS.length - 1), i = Math.floor(at);
  return `rgb(${STOPS[i].map((low, c) => Math.round(low + (at - i) * (STOPS[i + 1][c] - low)))})`;
}

function roundUp(x) {                                 // the next round number
  const power = 10 ** Math.floor(Math.log10(Math.max(x, 1e-4)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map(m => Number((m * power).toPrecision(2))).find(m => m >= 0.999 * x);
}

// paint: blue frames on painted patches. token: a white frame on this patch; -1: none.
function drawFrames(canvas, paint, token) {
  const context = canvas.getContext("2d"), side = canvas.width / 8;
  const frame = (i, style, width) => {
    context.strokeStyle = style;
    context.lineWidth = width;
    const x = i % 8 * side + width / 2, y = Math.floor(i / 8) * side + width / 2;
    context.strokeRect(x, y, side - width, side - width);
  };
  [...paint].forEach((digit, i) => { if (digit !== "0") frame(i, "#35d0ff", side / 12); });
  if (token < 0) return;
  frame(token, "black", side / 5);
  frame(token, "white", side / 9);
}

// f(value, pixel): the shown value, in [0, 1]
function drawPixels(canvas, pixels, f = x => x) {
  const context = canvas.getContext("2d"), side = canvas.width / 32;
  for (let i = 0; i < 1024; i++) {
    context.fillStyle = `rgb(${[0, 1, 2].map(c => Math.round(255 * f(pixels[1024 * c + i], 1024 * c + i)))})`;
    context.fillRect(i % 32 * side, Math.floor(i / 32) * side, side, side);
  }
}

function drawMap(canvas, values, most) {
  const context = canvas.getContext("2d"), side = canvas.width / 8;
  values.forEach((x, i) => {
    context.fillStyle = colour(x / most);
    context.fillRect(i % 8 * side, Math.floor(i / 8) * side, side, side);
  });
}

// Three networks, the four likeliest classes of each. Filled bar: this picture; line: without paint.
function drawAnswers(box, {answers}, classes) {
  box.innerHTML = Object.entries(answers).map(([name, {answer, before}]) => {
    const order = [...classes.keys()].sort((a, b) => answer[b] - answer[a]).slice(0, 4);
    return `<figure style="--kind:${COLOUR[name]}" role="img" aria-label="${TITLE[name]}: ${order.map(c =>
      `${classes[c]} ${percent(answer[c])}, without paint ${percent(before[c])}`).join("; ")}">` +
      `<figcaption>${TITLE[name]}: <b>${classes[order[0]]}</b></figcaption>` + order.map(c => `<span class="name">${classes[c]}</span>
      <span class="track"><i style="width:${100 * answer[c]}%"></i>${before[c] < 0.005 ? "" : `<b style="width:${100 * before[c]}%"></b>`}</span>
      <span class="value">${percent(answer[c])}</span>`).join("") + "</figure>";
  }).join("");
}

// A black frame and a cross: this network is fooled
function drawCross(canvas) {
  const context = canvas.getContext("2d"), side = canvas.width;
  for (const [style, width] of [["white", 9], ["black", 5]]) {
    context.strokeStyle = style;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(6, 6); context.lineTo(side - 6, side - 6);
    context.moveTo(side - 6, 6); context.lineTo(6, side - 6);
    context.stroke();
    context.strokeRect(0, 0, side, side);
  }
}

// The falling margin of an attack: the answer changes below the line
function marginCurve(margins, queries) {
  const top = Math.max(margins[0], 0.1), x = i => 4 + 152 * i / queries, y = m => 6 + 50 * (1 - Math.max(m, -0.15 * top) / top);
  return `<svg viewBox="0 0 160 72" role="img" aria-label="margin: ${margins[0].toFixed(2)} to ${margins.at(-1).toFixed(2)}">
    <path class="axis" d="M4 ${y(0)}H156"/><polyline points="${margins.map((m, i) => `${x(i)},${y(m)}`).join(" ")}"/></svg>`;
}

// Small multiples: one row per quantity, one column per step (or layer), one scale per row
function drawMaps(box, {columns, now}, token) {
  const rows = [
    {title: "attention to a patch", minor: true, unit: "from other tokens", maps: columns.map(({A}) => received(A))},
    {title: "attention of the framed patch", unit: "to each patch", maps: columns.map(({A}) => patches(j => looks(A, token + 1, j)))},
  ];
  if (columns[0].S) rows.unshift(
    {title: "|S|", unit: "1: longest key", most: 1, maps: columns.map(column => column.S)},
    {title: "|K − S − L|", minor: true, unit: "1: longest key", most: 1, maps: columns.map(column => column.left)});
  const shape = `${rows.length} x ${columns.length}`;
  if (box.dataset.shape !== shape) {                  // make new canvases only for a new shape
    box.dataset.shape = shape;
    box.style.setProperty("--columns", columns.length);
    box.innerHTML = "<span></span>".repeat(1 + columns.length) + rows.map(({minor}) =>
      `<div class="label${minor ? " minor" : ""}"><strong></strong><span class="scale"></span><span></span><span></span><em></em></div>` +
      `<canvas ${minor ? 'class="minor" ' : ""}width="96" height="96" role="img"></canvas>`.repeat(columns.length)).join("");
  }
  columns.forEach(({title}, i) => { box.children[1 + i].textContent = title; });
  const labels = box.querySelectorAll(".label"), canvases = box.querySelectorAll("canvas");
  rows.forEach(({title, unit, maps, most}, r) => {
    const top = most ?? roundUp(Math.max(...maps.map(values => Math.max(...values))));
    [title, "", "0", top, unit].forEach((text, i) => { labels[r].children[i].textContent = text; });
    maps.forEach((values, i) => {
      const canvas = canvases[r * columns.length + i];
      drawMap(canvas, values, top);
      drawFrames(canvas, now.paint, token);
      canvas.setAttribute("aria-label", `${title}, ${columns[i].title}: mean ${(sumOf(values) / 64).toFixed(4)}, ` +
        `in ${where(token)} ${values[token].toFixed(4)}`);
    });
  });
}

// An SVG curve over steps 1, 2, ...; dotted: {name: value}, horizontal lines for comparison
function curve(title, values, colour, dotted, unit) {
  const top = roundUp(1.02 * Math.max(...values, ...Object.values(dotted))), right = 268, bottom = 150;
  const x = i => 50 + (values.length > 1 ? i * (right - 60) / (values.length - 1) : 0);
  const y = value => bottom - 120 * value / top;
  const nulls = Object.entries(dotted).map(([name, value]) => ({name, value, at: y(value)}));
  nulls.sort((a, b) => a.at - b.at);
  if (nulls.length > 1 && nulls[1].at - nulls[0].at < 16) nulls[1].label = nulls[0].at + 16;
  return `<figure><figcaption>${title}</figcaption>
    <svg viewBox="0 0 430 188" role="img" style="--kind:${colour}" aria-label="${title}: ${values.map(v => v.toFixed(3)).join(", ")}">
    <path class="axis" d="M42 22V${bottom}H${right}"/>
    <text x="36" y="${y(top) + 4}" text-anchor="end">${top}</text><text x="36" y="${bottom + 4}" text-anchor="end">0</text>
    ${nulls.map(({name, value, at, label}) => `<path d="M42 ${at}H${right}" class="dotted ${name}"/>
      <text x="${right + 5}" y="${(label ?? at) + 4}" class="${name}">${name} ${value.toFixed(2)}</text>`).join("")}
    <polyline points="${values.map((value, i) => `${x(i)},${y(value)}`).join(" ")}"/>
    ${values.map((value, i) => `<circle cx="${x(i)}" cy="${y(value)}" r="4"/>
      <text x="${x(i)}" y="${bottom + 17}" text-anchor="middle">${values.length > 8 && i % 2 ? "" : unit === "layer" ? i : i + 1}</text>`).join("")}
    <text x="${(42 + right) / 2}" y="184" text-anchor="middle">${unit}</text></svg></figure>`;
}
