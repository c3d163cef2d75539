"""4. Predict, then measure: is S where the corruption is? (in class, stop 4)

Write what you expect in place of each ..., then `python -m lecture.exercises 4` measures it. An AUC
is the chance that a corrupted patch has more |S| than an intact one, after four steps in layer 0 of
weights/shapes_rpc.pt. It lies between 0 and 1; 0.5 means that S knows nothing.
"""

# Twelve single pixels of each of 100 scenes get a random colour; their patches are corrupted.
auc_of_pixels = ...

# A block of 2 x 2 patches of each of 100 scenes is changed until the network is wrong.
auc_of_attacked = ...
