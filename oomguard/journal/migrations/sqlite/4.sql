-- Why the attempt failed, if its status and incident do not say it.
ALTER TABLE attempt ADD COLUMN error TEXT;
