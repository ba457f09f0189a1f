"""A first recipe for a user's images: sizes, network, budget and training that are usual for them.

Every choice has its reason beside it. Papers: Madry et al. 2018 (PGD training, 8/255 on 32 px),
Debenedetti et al. 2023 (one FGSM step with a rising epsilon, 4/255 on 224 px), Croce & Hein 2020
(AutoAttack), Cohen et al. 2019 (l2 certificates), Salman et al. 2022 (column ablations).
"""
