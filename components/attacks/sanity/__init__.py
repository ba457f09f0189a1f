"""Sanity checks of our own attacks: is the robust accuracy reliable?

A failed attack does not prove robustness. Each check compares a measurement with a limit that
working attacks never exceed (Athalye et al. 2018, sec. 3; Carlini et al. 2019, "On Evaluating
Adversarial Robustness", sec. 5; Croce & Hein 2020 and the flags of their code).

- `findings.py`: one finding per check, and the verdict over all of them;
- `model.py`: can the model be attacked? Functions of a model and images;
- `outcomes.py`: did the attacks work? Functions of counts, masks and accuracies;
- `audit.py`: all of them on a few items, with small attacks.
"""
