-- One row per run, with the number by which users name it.
CREATE TABLE run (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  session TEXT NOT NULL UNIQUE,
  original TEXT NOT NULL,        -- JSON list: the command before any patch, secrets masked
  folder TEXT,                   -- the working directory; NULL if not recorded, like all columns below
  files TEXT,                    -- digest of the files that the command names
  engine TEXT,
  engine_version TEXT,
  model TEXT,                    -- masked
  device TEXT,                   -- name and size of the GPUs
  forgotten INTEGER NOT NULL DEFAULT 0
);
ALTER TABLE attempt ADD COLUMN set_by_user TEXT;  -- JSON object: setting -> whether the user had set it
CREATE INDEX attempt_session ON attempt (session, number);

-- The runs of the attempts that are already there.
INSERT INTO run (session, original, engine, engine_version)
SELECT first.session, first.command,
  json_extract(failed.incident, '$.framework'), json_extract(failed.incident, '$.framework_version')
FROM (
  SELECT min(id) AS first, max(CASE WHEN incident IS NOT NULL THEN id END) AS failed
  FROM attempt GROUP BY session
) AS ids
JOIN attempt AS first ON first.id = ids.first
LEFT JOIN attempt AS failed ON failed.id = ids.failed
ORDER BY ids.first;

-- An oomguard of schema 1 that is still running keeps writing attempts; this gives them a run.
CREATE TRIGGER attempt_of_no_run AFTER INSERT ON attempt
WHEN NOT EXISTS (SELECT 1 FROM run WHERE session = NEW.session)
BEGIN
  INSERT INTO run (session, original) VALUES (NEW.session, NEW.command);
END;
