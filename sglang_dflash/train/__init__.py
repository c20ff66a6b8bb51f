"""Making a drafter for a target: data, loss, loop, export, evaluation."""
