"""All attacks by name: to add one, write its settings and its file, and add a line here."""

from components.attacks import settings as s
from components.core.registry import Registry

ATTACKS = Registry("attack")
ATTACKS.add(s.FgsmSettings, "components.attacks.gradient:Fgsm")
ATTACKS.add(s.PgdSettings, "components.attacks.gradient:Pgd")
ATTACKS.add(s.MimSettings, "components.attacks.gradient:Mim")
ATTACKS.add(s.GamaSettings, "components.attacks.gradient:GamaPgd")
ATTACKS.add(s.ApgdSettings, "components.attacks.apgd:Apgd")
ATTACKS.add(s.ApgdTargetedSettings, "components.attacks.apgd:ApgdTargeted")
ATTACKS.add(s.FabSettings, "components.attacks.fab:Fab")
ATTACKS.add(s.FabTargetedSettings, "components.attacks.fab:FabTargeted")
ATTACKS.add(s.SquareSettings, "components.attacks.square:Square")
ATTACKS.add(s.SpatialSettings, "components.attacks.spatial:SpatialGrid")
ATTACKS.add(s.AutoAttackSettings, "components.attacks.autoattack:AutoAttack")
ATTACKS.add(s.AasSettings, "components.attacks.aas:ScaledAttack")
