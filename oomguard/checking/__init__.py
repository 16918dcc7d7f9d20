"""What ``oomguard doctor`` looks at: this machine's versions, devices and limits, and oomguard's own files on it."""
