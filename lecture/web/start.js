// Where the page starts: the first picture, its paint and setting, and the five rounds.

const PAINTED = [1, 6, 10, 35, 46, 60];               // the page paints these six patches
const NO_PAINT = "0".repeat(64);
const paintWith = digit => [...NO_PAINT].map((_, i) => PAINTED.includes(i) ? digit : "0").join("");
const STANDARD = {network: "rpc", scene: 2, kind: "noise", amount: 0, lambd: 4, n_iter: 4, form: "released",
                  paint: paintWith("1"), layers: [0], temperature: 1, eps: 6, perfect: 0, empty: 0, out: 0, guess: ""};

// Five rounds: (scene, brush). The round with the same noise in all patches (brush 4) asks about robust PCA.
const ROUNDS = [[2, "1"], [8, "1"], [3, "1"], [5, "4"], [4, "3"]];
const asksRobustPca = now => now.paint.includes("4");
const rightGuess = ({now, on, off, areas}) => !asksRobustPca(now) ? larger(on.S, off.S)
  : areas.real > 0.75 ? "near 1" : "near 0.5";
const CONCLUSION = "After five pictures: S of RPC-Attention is large where the keys are large, and S of robust PCA is " +
  "large where a patch is unlike all others.";

// The effect of the boxes on average. contrast: [mean, low, high] of perfect S minus as trained.
const meanInWords = ({contrast: [mean, low, high], accuracy}) => "Accuracy over 1,000 noisy scenes. Perfect S in six other networks: " +
  `${signed(mean)} points (${signed(low)} to ${signed(high)}). This network: ` +
  Object.entries(accuracy).map(([name, x]) => `${name} ${x.toFixed(1)} %`).join(", ") + ".";
const signed = x => `${x < 0 ? "-" : "+"}${Math.abs(x).toFixed(1)}`;
