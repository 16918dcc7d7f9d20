-- Whether masking hid only secrets of the command; if not, different commands look the same.
ALTER TABLE run ADD COLUMN hides_secrets_alone INTEGER;
