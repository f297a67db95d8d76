"""`trainer.gradient_clipping`: bounds on the gradient before an update."""

from typing import Annotated, TypeAlias

from pydantic import Field

from brim.config.schema.base import Section, key

Bound: TypeAlias = Annotated[float, Field(gt=0)]


class GradientClippingConfig(Section):
    """Bounds on the gradient before an update; each is off when null."""

    clipglobalnorm: Bound | None = key(0.5, "Largest norm of all gradients together.")
    clipnorm: Bound | None = key(None, "Also a bound on the norm of all gradients, as in Ludwig's code.")
    clipvalue: Bound | None = key(None, "Largest absolute value of any one gradient.")
