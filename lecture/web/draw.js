// Pictures, maps over the patches, bars and curves.

const COLOUR = {softmax: "#8a8a8a", symmetric: "#3584c9", rpc: "#d0453a"};     // everywhere the same
const TITLE = {softmax: "softmax", symmetric: "symmetric", rpc: "RPC"};
const STOPS = [[0, 0, 4], [81, 18, 124], [183, 55, 121], [252, 137, 97], [252, 253, 191]];

function colour(x) {                                  // 0 to 1: black, violet, orange, pale yellow
  const at = Math.min(Math.max(x, 0), 0.9999) * (STOPS.length - 1), i = Math.floor(at);
  return `rgb(${STOPS[i].map((low, c) => Math.round(low + (at - i) * (STOPS[i + 1][c] - low)))})`;
}

function roundUp(x) {                                 // to a round number
  const power = 10 ** Math.floor(Math.log10(Math.max(x, 1e-4)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map(m => Number((m * power).toPrecision(2))).find(m => m >= 0.999 * x);
}

// paint: the damaged patches, cyan. token: the patch pointed at, white.
function drawFrames(canvas, paint, token) {
  const context = canvas.getContext("2d"), side = canvas.width / 8;
  const frame = (i, style, width) => {
    context.strokeStyle = style;
    context.lineWidth = width;
    const x = i % 8 * side + width / 2, y = Math.floor(i / 8) * side + width / 2;
    context.strokeRect(x, y, side - width, side - width);
  };
  [...paint].forEach((digit, i) => { if (digit !== "0") frame(i, "#35d0ff", side / 12); });
  frame(token, "black", side / 5);
  frame(token, "white", side / 9);
}

// f(value, pixel): what is shown of it, in [0, 1]
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

// Filled: this picture; line: the picture without damage
function drawBars(box, {answer, before, now}, classes) {
  const best = answer.indexOf(Math.max(...answer));
  box.parentNode.style.setProperty("--kind", COLOUR[now.network]);
  box.innerHTML = classes.map((name, c) => `<span class="name${c === best ? " best" : ""}">${name}</span>
    <span class="track"><i style="width:${100 * answer[c]}%"></i>${before[c] < 0.005 ? "" : `<b style="width:${100 * before[c]}%"></b>`}</span>
    <span class="value">${percent(answer[c])}</span>`).join("");
  box.setAttribute("aria-label", classes.map((name, c) =>
    `${name} ${percent(answer[c])}, without damage ${percent(before[c])}`).join("; "));
}

// Small multiples: a row a quantity, a column a step (or layer), one scale a row
function drawMaps(box, {columns, now}, token) {
  const rows = [
    {title: "attention that a patch gets", minor: true, unit: "from other tokens", maps: columns.map(({A}) => received(A))},
    {title: "attention of the framed patch", unit: "to each patch", maps: columns.map(({A}) => patches(j => looks(A, token + 1, j)))},
  ];
  if (columns[0].S) rows.unshift(
    {title: "|S|", unit: "1: the longest key", most: 1, maps: columns.map(column => column.S)},
    {title: "|K − S − L|", minor: true, unit: "1: the longest key", most: 1, maps: columns.map(column => column.left)});
  const shape = `${rows.length} x ${columns.length}`;
  if (box.dataset.shape !== shape) {                  // canvases are made once for a shape
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

// An SVG line over steps 1, 2, ...; dotted: {name: value} of lines to compare with
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

// Margins of the attacked networks by query, as the inside of an SVG of 400 x 210
function marginCurves(attacks) {
  const all = attacks.flatMap(({search}) => search.margins), low = Math.min(...all, -1), high = roundUp(Math.max(...all, 1));
  const most = Math.max(...attacks.map(({search}) => search.margins.length), 20);
  const x = query => 40 + 340 * query / most, y = value => 150 - 110 * (value - low) / (high - low);
  const text = (x, y, anchor, words) => `<text x="${x}" y="${y}" text-anchor="${anchor}">${words}</text>`;
  return `<path class="axis" d="M40 40V150H380"/><path class="dotted uniform" d="M40 ${y(0)}H380"/>` +
    text(34, y(0) + 4, "end", 0) + text(34, 44, "end", high) + text(48, 30, "start", "margin") +
    text(40, 168, "middle", 0) + text(380, 168, "middle", most) + text(210, 168, "middle", "queries") +
    attacks.map(({name, search}, i) => `<polyline class="line-${i}" style="--kind:${COLOUR[name]}"
      points="${search.margins.map((value, query) => `${x(query)},${y(value)}`).join(" ")}"/>
      <path class="line-${i} legend" style="--kind:${COLOUR[name]}" d="M${40 + 128 * i} 196h26"/>` +
      text(72 + 128 * i, 200, "start", TITLE[name])).join("");
}
