"""Claims jobs, scores them, stores the results, delivers the webhooks."""
