"""Reading and changing the attention of timm's transformers, without a fork.

Every function takes a bare timm network (`PixelModel.net`), every context manager restores it
exactly, also after an exception.

- `discover.py`: residual blocks and softmax attention modules in execution order, or an error;
- `scaling.py`: one factor per attention module on its pre-softmax logits, differentiable;
- `gaps.py`: gap between the two largest pre-softmax logits;
- `masks.py`: which tokens may attend to which;
- `features.py`: the residual stream after every block;
- `lesions.py`: removal of a block, its attention or its MLP;
- `softmax.py`, `shadow.py`: the two mechanisms that they use.
"""
