"""The plan of a migration, as a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.cli.output import complain, echo, print_json, print_table

if TYPE_CHECKING:
    from appliance.migrate.plan import TopicPlan


def show_plan(plans: list[TopicPlan], as_json: bool) -> int:
    """Print a plan. Returns the exit status."""
    if as_json:
        print_json(
            [
                {
                    "topic": plan.source.name, "partitions": plan.source.partition_count,
                    "offsets": plan.offset_count, "offsets_are": plan.offsets,
                    "settings": {**plan.mapped.configs, **plan.mapped.at_switch},
                    "notes": plan.mapped.notes, "refused": plan.refusals,
                }
                for plan in plans
            ]
        )  # fmt: skip
    else:
        print_table(
            ["TOPIC", "PARTITIONS", "RECORDS UP TO", "OFFSETS", "SETTINGS"],
            [
                [plan.source.name, plan.source.partition_count, plan.offset_count, plan.offsets,
                " ".join(
                    f"{name}={value}"
                    for name, value in {**plan.mapped.configs, **plan.mapped.at_switch}.items()
                )]
                for plan in plans
            ],
        )  # fmt: skip
        for plan in plans:
            for sentence in plan.mapped.notes:
                echo(f"{plan.source.name}: {sentence}")
            for sentence in plan.refusals:
                complain(sentence)
    return 1 if any(plan.refusals for plan in plans) else 0
