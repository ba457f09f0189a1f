"""Files that start a recipe's flow on a cluster: KubeRay, Argo, SkyPilot, the cluster launcher.

One module per kind of file. Needs neither torch nor Ray nor a cluster: a recipe and a few settings
become text.
"""
