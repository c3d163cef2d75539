"""8. Predict, then measure: what does lambda do? (appendix C, `released`)

The threshold of S is lambda times mu. With lambda = 4, four steps on the keys of 64 scenes leave
53 % of the entries of S nonzero, and the entropy of attention is 2.16 nats (ln 65 = 4.17 if
attention is uniform). Write your predictions in place of "...". Then
`python -m lecture.exercises 8` measures the numbers.

On paper first: what is S in the first step if the threshold is 0? Which keys are left?
"""

# lambda = 0: the share of entries of S that are not 0, in %, and the entropy, in nats.
share_of_lambda_0 = ...
entropy_of_lambda_0 = ...

# lambda = 1
share_of_lambda_1 = ...
entropy_of_lambda_1 = ...
