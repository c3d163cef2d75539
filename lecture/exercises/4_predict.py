"""4. Predict, then run: is S where the damage is? Two kinds that the lecture leaves out (stop 4).

Write what you expect in place of ..., then `python -m lecture.exercises 4` measures it. An AUC is
the chance that a damaged patch has more |S| than an undamaged one, after four steps in layer 0 of
weights/shapes_rpc.pt: between 0 and 1, and 0.5 says that S knows nothing.
"""

# Twelve single pixels of 100 scenes get a random colour; the patches that they lie in count.
auc_of_pixels = ...

# A block of 2 x 2 patches of 100 scenes is changed until the network errs: an adversarial patch.
auc_of_attacked = ...
