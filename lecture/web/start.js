// Where the page starts: the first picture, its paint and setting, and the five guesses.

const PAINTED = [1, 6, 10, 35, 46, 60];               // the page paints these six patches
const NO_PAINT = "0".repeat(64);
const paintWith = digit => [...NO_PAINT].map((_, i) => PAINTED.includes(i) ? digit : "0").join("");
// Five guesses: (scene, brush)
const ROUNDS = [[2, "1"], [8, "3"], [3, "2"], [4, "3"], [5, "1"]];
const STANDARD = {network: "rpc", scene: 2, kind: "noise", amount: 0, lambd: 4, n_iter: 4, form: "released",
                  paint: paintWith("1"), layers: [0], temperature: 1, eps: 6, perfect: 0, out: 0, guess: ""};

// The scene was chosen: what happens on average (studies/results/perfect_s, noise)
const MEAN = "The first scene is a chosen example. With perfect S, eight of these ten scenes keep their answer under the same " +
  "noise. Mean over eight networks and 1,000 scenes with noisy patches: perfect S changes the accuracy by -1.1 points " +
  "(-3.2 to +1.1), leaving the patches out of every layer by +5.3 points (+4.2 to +6.4).";
