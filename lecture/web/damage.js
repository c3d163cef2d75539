// Pictures: random numbers with a seed, paint on pixels and patches, and the reader's own picture.
// A picture is 3,072 numbers in [0, 1], channel first, 32 x 32; its 64 patches are 4 x 4.

// Marsaglia's xorshift: numbers in [0, 1); equal seeds give equal numbers
function randomNumbers(seed) {
  let state = Math.imul(seed + 1, 2654435761) | 1;
  const next = () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 2 ** 32;
  };
  for (let i = 0; i < 8; i++) next();
  return next;
}

// The page's noise: pattern 10, chosen from patterns 1 to 20 because it is typical. tests/test_page.py has its AUCs.
const PATTERN = 10;
const patchOf = i => Math.floor(i % 1024 / 128) * 8 + Math.floor(i % 32 / 4);      // of pixel i

// A smooth field of 32 x 32 numbers in [0, 1]: random corners of 8 x 8 squares, blended
function fogField(random) {
  const corner = Float32Array.from({length: 25}, random);
  const blend = (a, b, t) => a + (b - a) * t * t * (3 - 2 * t);
  return Float32Array.from({length: 1024}, (_, i) => {
    const row = Math.floor(i / 32), column = i % 32, at = 5 * Math.floor(row / 8) + Math.floor(column / 8);
    return blend(blend(corner[at], corner[at + 1], column % 8 / 8),
                 blend(corner[at + 5], corner[at + 6], column % 8 / 8), row % 8 / 8);
  });
}

// kind: "noise" adds Gaussian noise of standard deviation amount; "fog" mixes in fog with weight amount.
// paint: 64 digits, 0 no paint, 1 noise, 2 black, 3 white, 4 the noise of the first patch. The result
// stays within [0, 1].
function damaged(pixels, {kind, amount, paint}, pattern = PATTERN) {
  const random = randomNumbers(pattern), fog = fogField(random);
  const pairs = Array.from(pixels, () => [random(), random()]);
  const inFirstPatch = i => i - i % 1024 + Math.floor(i % 128 / 32) * 32 + i % 4;
  return pixels.map((x, i) => {
    const [u, v] = pairs[i], normal = Math.sqrt(-2 * Math.log(1 - u)) * Math.cos(2 * Math.PI * v);
    const spoilt = kind === "fog" ? x + amount * (0.6 + 0.4 * fog[i % 1024] - x) : x + amount * normal;
    return [Math.min(Math.max(spoilt, 0), 1), u, 0, 1, pairs[inFirstPatch(i)][0]][paint[patchOf(i)]];
  });
}

// Resize a photo as the evaluations do: short side to 32, antialiased bicubic, central square.
// rgba: bytes of width x height. A generator, so that the page can react while a large photo shrinks.
function* resized(rgba, width, height) {
  const cubic = x => (x = Math.abs(x)) < 1 ? (1.5 * x - 2.5) * x * x + 1
                   : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
  const taps = side => {                              // for each of 32 pixels: first source, weights
    const long = Math.floor(32 * side / Math.min(width, height)), half = (long - 32) / 2;
    const skipped = half % 1 ? 2 * Math.round(half / 2) : half;       // Python's round: half to even
    const factor = side / long, spread = Math.max(factor, 1);         // source pixels to one of ours
    return Array.from({length: 32}, (_, i) => {
      const centre = (i + skipped + 0.5) * factor;
      const first = Math.max(Math.floor(centre - 2 * spread + 0.5), 0);
      const last = Math.min(Math.floor(centre + 2 * spread + 0.5), side);
      const weight = Array.from({length: last - first}, (_, j) => cubic((first + j + 0.5 - centre) / spread));
      const sum = weight.reduce((a, b) => a + b);
      return {first, weight: weight.map(w => w / sum)};
    });
  };
  const across = taps(width), down = taps(height), rows = new Float32Array(height * 96);
  for (let y = 0; y < height; y++) {
    across.forEach(({first, weight}, x) => {
      for (let c = 0; c < 3; c++) {
        let sum = 0;
        for (let j = 0; j < weight.length; j++) sum += weight[j] * rgba[4 * (y * width + first + j) + c];
        rows[(y * 32 + x) * 3 + c] = Math.min(Math.max(Math.round(sum), 0), 255);
      }
    });
    if (y % 16 === 15) yield;
  }
  const pixels = new Float32Array(3072);
  down.forEach(({first, weight}, y) => {
    for (let x = 0; x < 32; x++)
      for (let c = 0; c < 3; c++) {
        let sum = 0;
        for (let j = 0; j < weight.length; j++) sum += weight[j] * rows[((first + j) * 32 + x) * 3 + c];
        pixels[(c * 32 + y) * 32 + x] = Math.min(Math.max(Math.round(sum), 0), 255) / 255;
      }
  });
  return pixels;
}
