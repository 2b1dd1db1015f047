"""The appliance under an operator: processes, restarts, logs, metrics, console, runbook."""
