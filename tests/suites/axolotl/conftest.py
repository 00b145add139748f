"""Where the assertions of the shared tests get their explanations, and what they share."""

import pytest

pytest.register_assert_rewrite("suites.axolotl_cases", "suites.axolotl_refusals", "suites.axolotl_runs")

from suites.axolotl_runs import place  # noqa: E402, F401
