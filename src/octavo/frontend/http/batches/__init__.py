"""Files and batches: uploads kept on disk, and the runner that answers their lines beside live traffic."""
