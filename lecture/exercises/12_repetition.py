"""12. Predict, then measure: one patch, six different patches, six equal patches (homework, stop 4)

Stop 4 repeats a patch of noise. Here the patches are flat: every pixel of a patch has the same
colour. Write your predictions in place of "...". Then `python -m lecture.exercises 12` measures the
AUC of S of real robust PCA (one step of ADMM) in layer 0 of weights/shapes_symmetric.pt, on 100
scenes.

On paper first: the key of a patch in layer 0 is nearly a linear function of the pixels. How many
directions describe the keys of six patches of noise? Of six patches of six colours? Of six patches
of one colour?
"""

# One patch of a random colour.
auc_of_one = ...

# Six patches, each of a random colour of its own.
auc_of_six_different = ...

# Six patches of one random colour.
auc_of_six_equal = ...
