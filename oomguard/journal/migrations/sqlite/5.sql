-- Who ran it, and where.
ALTER TABLE run ADD COLUMN who TEXT;
ALTER TABLE run ADD COLUMN host TEXT;
ALTER TABLE run ADD COLUMN clock_offset_s DOUBLE;  -- shared journals only; always NULL here
