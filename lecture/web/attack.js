// An attack without gradients, from the network's answers alone: random search over squares, after Square Attack
// (Andriushchenko et al. 2020). The same seed proposes the same squares to every network.
//
// One query: give propose() to the network, then tell() the margin. The margin is the logit of the
// answer to the unchanged picture minus the largest other logit: below 0 the answer has changed.

class SquareAttack {
  constructor(pixels, eps, seed) {
    Object.assign(this, {pixels, eps, random: randomNumbers(seed), margins: []});
    this.best = this.candidate = pixels;              // query 0 is the picture itself
  }

  // The next proposal: within eps of the given picture and within [0, 1]
  propose() {
    const query = this.margins.length;
    if (query === 0) return this.pixels;
    const sign = () => this.random() < 0.5 ? -1 : 1;
    if (query === 1) {                                // stripes, one pixel wide
      const signs = Array.from({length: 96}, sign);   // of each channel and column
      return this.candidate = this.moved(this.pixels, i => signs[Math.floor(i / 1024) * 32 + i % 32]);
    }
    const side = Math.max(Math.round(32 * Math.sqrt(0.05 * 0.5 ** (query / 150))), 2);  // squares shrink
    const left = Math.floor(this.random() * (33 - side)), top = Math.floor(this.random() * (33 - side));
    const signs = [sign(), sign(), sign()];
    return this.candidate = this.moved(this.best, i => {
      const x = i % 32 - left, y = Math.floor(i % 1024 / 32) - top;
      return x >= 0 && x < side && y >= 0 && y < side ? signs[Math.floor(i / 1024)] : 0;
    });
  }

  // start, but pixels with a sign of -1 or 1 become the given picture's pixel minus or plus eps
  moved(start, signs) {
    return start.map((x, i) => {
      const sign = signs(i);
      return sign ? Math.min(Math.max(this.pixels[i] + sign * this.eps, 0), 1) : x;
    });
  }

  tell(margin) {
    const least = this.margins.at(-1) ?? Infinity;
    if (margin < least) this.best = this.candidate;
    this.margins.push(Math.min(margin, least));
  }

  get fallen() { return this.margins.at(-1) < 0; }
}

const margin = (logits, answer) => logits[answer] - Math.max(...logits.filter((_, c) => c !== answer));
