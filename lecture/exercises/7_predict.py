"""7. Predict, then run: three numbers that the lecture measures (sections 6, 5 and 8).

Write what you expect in place of ..., then `python -m lecture.exercises 7` measures it.
"""

# Six of the 64 patches of 300 scenes become noise. The chance that a damaged patch has more |S|
# than an undamaged one, after four steps in layer 1 of weights/shapes_rpc.pt: between 0 and 1.
auc_of_S = ...

# Mean entropy of the rows of that layer's attention after four steps, over 64 undamaged scenes, in
# nats. Uniform attention over 65 tokens has ln 65 = 4.17; the same keys without PAP have 2.94.
entropy_after_four_steps = ...

# Which of the three classifiers in weights/ keeps the fewest of 64 scenes when PGD may move each
# pixel by 2/255: "softmax", "symmetric" or "rpc"?
falls_first = ...
