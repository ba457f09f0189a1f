"""A look and a hand inside timm's transformers, without a fork.

Every function takes a bare timm network (`PixelModel.net`), every context manager leaves it bit for
bit as it was, also after an exception.

- `discover.py`: residual blocks and softmax attention modules in execution order, or a refusal;
- `scaling.py`: one factor per attention module on its pre-softmax logits, differentiable;
- `gaps.py`: how far the largest pre-softmax logit leads the second;
- `masks.py`: which tokens may attend to which;
- `features.py`: the residual stream after every block;
- `lesions.py`: a block, its attention or its MLP taken out;
- `softmax.py`, `shadow.py`: the two mechanisms behind them.
"""
