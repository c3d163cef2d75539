// The PAP explorer: looks up what attention.py computed when the page was made. Nothing is computed here.
(async () => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const $ = name => document.getElementById("ex-" + name);

  async function unpack(text) {                       // base64 of zlib to bytes
    const packed = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const pixels = await unpack(data.pixels), maps = await unpack(data.maps);
  const MAP = 64 + 64 + 64 * 64;                      // |S|, residual, attention
  let token = 27;                                     // the patch whose attention is shown

  for (const name of data.images) $("image").add(new Option(name));
  for (const name of data.forms) $("form").add(new Option(name));
  $("lambda").max = data.lambdas.length - 1;
  $("lambda").value = data.lambdas.indexOf(4);
  $("step").max = data.steps;
  $("step").value = 4;

  function place(step) {                              // which map: by image, reading, lambda, step
    const image = $("image").selectedIndex, form = $("form").selectedIndex;
    const lambda = Number($("lambda").value);
    return ((image * data.forms.length + form) * data.lambdas.length + lambda) * data.steps + step - 1;
  }

  function colour(x) {                                // 0..1: black, violet, orange, pale yellow
    const stops = [[0, 0, 4], [81, 18, 124], [183, 55, 121], [252, 137, 97], [252, 253, 191]];
    const at = Math.min(x, 0.999) * (stops.length - 1), i = Math.floor(at), part = at - i;
    return stops[i].map((low, c) => Math.round(low + part * (stops[i + 1][c] - low)));
  }

  function frame(context, i) {
    context.strokeStyle = "#35d0ff";
    context.lineWidth = 2;
    context.strokeRect((i % 8) * 24 + 1, Math.floor(i / 8) * 24 + 1, 22, 22);
  }

  function drawMap(canvas, values, most, framed) {
    const context = canvas.getContext("2d");
    values.forEach((x, i) => {
      context.fillStyle = `rgb(${colour(x / most)})`;
      context.fillRect((i % 8) * 24, Math.floor(i / 8) * 24, 24, 24);
    });
    if (framed) frame(context, token);
  }

  function drawPicture() {
    const context = $("picture").getContext("2d"), start = $("image").selectedIndex * 3072;
    for (let i = 0; i < 1024; i++) {
      context.fillStyle = `rgb(${pixels.subarray(start + 3 * i, start + 3 * i + 3)})`;
      context.fillRect((i % 32) * 6, Math.floor(i / 32) * 6, 6, 6);
    }
    frame(context, token);
  }

  function drawCurve(svg, which, top, words) {
    const at = (value, step) => [25 + (step - 1) * 200 / (data.steps - 1), 90 - 80 * Math.min(value / top, 1)];
    const values = Array.from({length: data.steps}, (_, i) => data.curves[place(i + 1)][which]);
    const points = values.map((value, i) => at(value, i + 1)), step = Number($("step").value);
    const ticks = values.map((_, i) => `<text x="${points[i][0]}" y="106" text-anchor="middle">${i + 1}</text>`);
    svg.innerHTML = `<path d="M25 10V90H235" class="axis"/><text x="20" y="15" text-anchor="end">${top}</text>
      <text x="20" y="92" text-anchor="end">0</text>${ticks.join("")}
      <polyline points="${points.join(" ")}"/><circle cx="${points[step - 1][0]}" cy="${points[step - 1][1]}" r="5"/>`;
    svg.setAttribute("aria-label", `${words} in steps 1 to ${data.steps}: ${values.map(x => x.toFixed(2)).join(", ")}`);
  }

  function draw() {
    const step = Number($("step").value), start = place(step) * MAP;
    const S = maps.subarray(start, start + 64), left = maps.subarray(start + 64, start + 128);
    const row = maps.subarray(start + 128 + 64 * token, start + 192 + 64 * token);
    const attention = Array.from(row, x => (x / 255) ** 2);            // stored as square roots
    const onPatches = attention.reduce((a, b) => a + b), most = Math.max(...attention, 1e-6);
    const [residual, entropy] = data.curves[place(step)];
    drawPicture();
    drawMap($("S"), S, 255);
    drawMap($("left"), left, 255);
    drawMap($("attention"), attention, most, true);
    drawCurve($("residual"), 0, 1.5, "residual");
    drawCurve($("entropy"), 1, 4.2, "entropy in nats");

    const full = S.reduce((a, b) => a + b) / 64 / 2.55, where = `row ${Math.floor(token / 8) + 1}, column ${token % 8 + 1}`;
    $("lambda-value").value = data.lambdas[$("lambda").value];
    $("step-value").value = step;
    $("picture").setAttribute("aria-label", `${data.images[$("image").selectedIndex]}; framed: ${where}`);
    $("S").setAttribute("aria-label", `size of S of 64 patches, on average ${full.toFixed(0)} per cent of the longest key`);
    $("left").setAttribute("aria-label", `size of K minus S minus L of 64 patches`);
    $("attention").setAttribute("aria-label", `attention of the patch in ${where} to 64 patches`);
    $("words").textContent = `Step ${step}, λ = ${data.lambdas[$("lambda").value]}, ${data.forms[$("form").selectedIndex]}: ` +
      `S is ${full.toFixed(0)} % of the longest key on average, the residual ${residual.toFixed(2)} of |K|, ` +
      `entropy ${entropy.toFixed(2)} nats. The patch in ${where} gives itself ${(100 * attention[token]).toFixed(0)} % ` +
      `of its attention, other patches ${(100 * (onPatches - attention[token])).toFixed(0)} %.`;
  }

  for (const name of ["image", "form", "lambda", "step"]) $(name).addEventListener("input", draw);
  for (const name of ["picture", "S", "left", "attention"]) {
    const point = event => {
      const box = event.target.getBoundingClientRect();
      const x = Math.floor(8 * (event.clientX - box.left) / box.width), y = Math.floor(8 * (event.clientY - box.top) / box.height);
      token = Math.min(Math.max(y, 0), 7) * 8 + Math.min(Math.max(x, 0), 7);
      draw();
    };
    $(name).addEventListener("pointermove", point);
    $(name).addEventListener("pointerdown", point);
    $(name).addEventListener("keydown", event => {
      const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
      if (!moves) return;
      const x = Math.min(Math.max(token % 8 + moves[0], 0), 7), y = Math.min(Math.max(Math.floor(token / 8) + moves[1], 0), 7);
      token = 8 * y + x;
      event.preventDefault();
      event.stopPropagation();
      draw();
    });
  }
  document.getElementById("explorer").hidden = false;
  draw();
  document.documentElement.dataset.explorer = "ready";
})();
