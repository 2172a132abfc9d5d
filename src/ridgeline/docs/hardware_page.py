"""The page of published hardware figures beside ours."""

from __future__ import annotations

from ridgeline.report.table import markdown
from ridgeline.validate.hardware_claims import claims, claims_table


def hardware_markdown() -> str:
    """Every published figure of a hardware design with our value, the error and its reason."""
    intro = (
        "# Published hardware figures\n\nGenerated: `ridgeline hardware check`. Sources: LLMCompass (ISCA 2024,"
        " arXiv:2312.03134), DFX (MICRO 2022, arXiv:2209.10797), FlexFlow (HPCA 2017), NLP-Fast (PACT 2021). Figures"
        " 7, 8, 10 and 12 of LLMCompass are simulations; only what is marked measured is."
        " [Designs of chips](hardware.md) explains the models.\n\n"
    )
    return intro + markdown([claims_table(list(claims()))])
