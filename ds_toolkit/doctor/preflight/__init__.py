"""Before a job: every host is asked at once whether the job would start there, and whether it would last."""
