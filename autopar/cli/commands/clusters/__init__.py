"""Commands about clusters as they are rented and scheduled: what a run costs on several, and the files that start it on one.
Imports what the other commands do."""
