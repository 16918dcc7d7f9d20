-- One row per attempt. Times are Unix seconds.
CREATE TABLE IF NOT EXISTS attempt (
  id INTEGER PRIMARY KEY,
  session TEXT NOT NULL,         -- one oomguard run
  number INTEGER NOT NULL,       -- 1 is the first attempt
  started_at DOUBLE NOT NULL,
  ended_at DOUBLE,               -- NULL while it runs
  command TEXT NOT NULL,         -- JSON list, secrets masked
  settings TEXT NOT NULL,        -- JSON object: what oomguard has changed so far
  patches TEXT NOT NULL,         -- JSON list: the patches applied before this attempt
  incident JSON,                 -- the failure, as in the JSON contract; NULL if none was found
  predicted TEXT NOT NULL,       -- JSON object
  measured TEXT NOT NULL,        -- JSON object
  exit_status INTEGER
);
