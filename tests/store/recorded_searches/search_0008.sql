BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('v3.2.0.a');
CREATE TABLE autotune_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT autotune_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "autotune_alembic_version" VALUES('0008');
CREATE TABLE autotune_answers (
	"key" VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_answers PRIMARY KEY ("key")
);
INSERT INTO "autotune_answers" VALUES('inspection-1','inspection','{"context_bytes":0,"model":{"parameters":4386178}}','2026-11-21 15:41:14.829417');
INSERT INTO "autotune_answers" VALUES('prediction-1','prediction','{"batches":[],"largest_batch":64}','2026-11-21 15:41:14.831121');
CREATE TABLE autotune_environments (
	id VARCHAR(32) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_environments PRIMARY KEY (id), 
	CONSTRAINT uq_autotune_environments_fingerprint UNIQUE (fingerprint)
);
INSERT INTO "autotune_environments" VALUES('c2df4a2232d14993a76e5ed409259ddd','401aa93540420a62','{"device_label":"cuda:0","device_kind":"cuda","device_name":"NVIDIA H200","device_uuid":"GPU-00000000-0000-0000-0000-000000000000","device_memory_bytes":150323855360,"device_capability":[9,0],"driver":"580.159.04","gpu_policy":null,"host":{"processor":"AMD EPYC","usable_cores":2},"libraries":{},"measurement_revision":1,"cpus":null,"variables":{},"python":"3.11.2","packages":{"torch":"2.13.0","transformers":"5.23.0"},"cuda":"13.0","training_arguments_fields":["bf16","fp16"]}','2026-11-22 10:33:09.090640');
CREATE TABLE autotune_job_events (
	job_id VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_job_events PRIMARY KEY (job_id, number)
);
INSERT INTO "autotune_job_events" VALUES('11111111111111111111111111111111',1,'state','{"state":"queued"}','2026-11-22 09:58:23.876401');
INSERT INTO "autotune_job_events" VALUES('11111111111111111111111111111111',2,'state','{"state":"running","agent":"22222222222222222222222222222222"}','2026-11-22 09:58:23.910570');
INSERT INTO "autotune_job_events" VALUES('11111111111111111111111111111111',3,'state','{"state":"finished"}','2026-11-22 09:58:23.914234');
INSERT INTO "autotune_job_events" VALUES('33333333333333333333333333333333',1,'state','{"state":"queued"}','2026-11-22 09:58:23.919223');
CREATE TABLE autotune_jobs (
	number INTEGER NOT NULL, 
	id VARCHAR(32) NOT NULL, 
	study VARCHAR(512) NOT NULL, 
	request JSON NOT NULL, 
	needs_kind VARCHAR(16), 
	needs_gpu VARCHAR(64), 
	needs_memory_bytes BIGINT, 
	needs_count INTEGER NOT NULL, 
	priority INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	is_cancel_asked BOOLEAN NOT NULL, 
	attempts INTEGER NOT NULL, 
	problem JSON, 
	status JSON, 
	events INTEGER NOT NULL, 
	submitted_by VARCHAR(64) NOT NULL, 
	submitted_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	idempotency_key VARCHAR(128), losses INTEGER DEFAULT '0' NOT NULL, heard INTEGER DEFAULT '0' NOT NULL, device JSON, 
	CONSTRAINT pk_autotune_jobs PRIMARY KEY (number), 
	CONSTRAINT uq_autotune_jobs_id UNIQUE (id), 
	CONSTRAINT uq_autotune_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "autotune_jobs" VALUES(1,'11111111111111111111111111111111','frozen','{"model":"bert-tiny","effective_batch":64}',NULL,NULL,NULL,1,0,'finished',0,1,NULL,NULL,3,'operator','2026-11-22 09:58:23.869177','2026-11-22 09:58:23.883183','2026-11-22 09:58:23.911564','key-1',0,0,'{"host":"host","name":null,"kind":"cpu","uuids":[]}');
INSERT INTO "autotune_jobs" VALUES(2,'33333333333333333333333333333333','waits','{"model":"bert-large-uncased"}','cuda','h200',68719476736,1,1,'queued',0,0,NULL,NULL,1,'','2026-11-22 09:58:23.915088',NULL,NULL,NULL,0,0,NULL);
CREATE TABLE autotune_leases (
	name VARCHAR(544) NOT NULL, 
	token VARCHAR(32) NOT NULL, 
	owner VARCHAR(256) NOT NULL, 
	host VARCHAR(256) NOT NULL, 
	machine VARCHAR(256) NOT NULL, 
	pid INTEGER NOT NULL, 
	process_started VARCHAR(32) NOT NULL, 
	acquired_at DATETIME NOT NULL, 
	heartbeat_at DATETIME NOT NULL, 
	expires_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_leases PRIMARY KEY (name)
);
INSERT INTO "autotune_leases" VALUES('study bert','2deca2c11c2442f18d6b752e0dd973aa','ada','gpu-2','gpu-2 boot pid:[1]',21683,'1649203','2026-11-22 10:33:09.049327','2026-11-22 10:33:09.049327','2026-11-22 10:34:09.049327');
CREATE TABLE autotune_studies (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(512) NOT NULL, 
	workload_id VARCHAR(32) NOT NULL, 
	environment_id VARCHAR(32) NOT NULL, 
	request JSON NOT NULL, 
	ceiling JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	stopped_because TEXT, 
	best_trial_id VARCHAR(32), 
	baseline_trial_id VARCHAR(32), 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	seconds DOUBLE NOT NULL, 
	autotune_version VARCHAR(64) NOT NULL, stop_reason VARCHAR(16), left_out JSON, look JSON, 
	CONSTRAINT pk_autotune_studies PRIMARY KEY (id), 
	CONSTRAINT fk_autotune_studies_workload_id_autotune_workloads FOREIGN KEY(workload_id) REFERENCES autotune_workloads (id), 
	CONSTRAINT fk_autotune_studies_environment_id_autotune_environments FOREIGN KEY(environment_id) REFERENCES autotune_environments (id), 
	CONSTRAINT uq_autotune_studies_name UNIQUE (name)
);
INSERT INTO "autotune_studies" VALUES('709fc96c16fb48d785f513736479abb0','bert','5406a5520bc341d99c2cb09a25412854','c2df4a2232d14993a76e5ed409259ddd','{"schema_version":1,"model":"bert-large-uncased","effective_batch":64,"memory_limit_bytes":25769803776,"headroom_fraction":0.03,"headroom_bytes":null,"world_size":1,"precision":null,"gradient_checkpointing":"auto","attn_implementation":null,"optim":["adamw_torch_fused"],"batch_multiple":null,"objective":"throughput","trials":null,"time_budget_seconds":null,"trial_timeout_seconds":180.0,"measure_baseline":true,"fresh":false,"sampler":"autotune","seed":42}','{"limit_bytes":25769803776,"free_bytes":149250113536,"context_bytes":650117120,"headroom":{"fraction":0.03,"size_bytes":null}}','running',NULL,NULL,NULL,'2026-11-22 10:33:09.092417',NULL,0.0,'0.1.0',NULL,NULL,'{"differs": ["16 \u00d7 4 is another training than 64 \u00d7 1: with batches cut down to 4 \u00d7 1 samples, it has a loss of 1.2, not 1.1"], "cure": "--batch-multiple 64 searches batches of 64 and its multiples", "ruled_out": ["fused loss has a loss of 5.643, not 5.2398"], "unknown": null, "seconds": 1.25}');
CREATE TABLE autotune_tokens (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_tokens PRIMARY KEY (id), 
	CONSTRAINT uq_autotune_tokens_digest UNIQUE (digest)
);
INSERT INTO "autotune_tokens" VALUES('df0a51300ee44629841c00b0b256c305','operator','0000000000000000000000000000000000000000000000000000000000000000','run','2026-11-22 09:58:23.925972');
CREATE TABLE autotune_trials (
	id VARCHAR(32) NOT NULL, 
	study_id VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	stage VARCHAR(16) NOT NULL, 
	candidate JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	outcome JSON, 
	log_path TEXT, 
	started_at DATETIME NOT NULL, 
	seconds DOUBLE, 
	workload_id VARCHAR(32) NOT NULL, 
	environment_id VARCHAR(32) NOT NULL, 
	CONSTRAINT pk_autotune_trials PRIMARY KEY (id), 
	CONSTRAINT fk_autotune_trials_study_id_autotune_studies FOREIGN KEY(study_id) REFERENCES autotune_studies (id), 
	CONSTRAINT fk_autotune_trials_workload_id_autotune_workloads FOREIGN KEY(workload_id) REFERENCES autotune_workloads (id), 
	CONSTRAINT fk_autotune_trials_environment_id_autotune_environments FOREIGN KEY(environment_id) REFERENCES autotune_environments (id)
);
INSERT INTO "autotune_trials" VALUES('7803716ba61545b9930332e25f975be4','709fc96c16fb48d785f513736479abb0',0,'baseline','{"per_device_train_batch_size":8,"gradient_accumulation_steps":8,"precision":"fp32","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null,"cpu_affinity":false}','completed','{"schema_version":1,"measurement":{"step_seconds":1.54449,"step_seconds_each":[1.54449,1.54449,1.54449],"relative_spread":0.005,"samples_per_second":41.43762665993305,"peak_allocated_bytes":12235833344,"peak_reserved_bytes":12381585408,"warmup_step_seconds":[],"micro_steps_run":3,"micro_batch_bytes":0,"optimizer_seconds":null,"data_seconds":null,"device_used_bytes":null,"context_bytes":null,"peak_reserved_first_step_bytes":null,"allocation_retries":null,"train_loss":null,"skipped_steps":null,"joules_per_sample":null,"compile_seconds":null,"new_length_seconds":null,"epoch_lengths":null,"worst_batch_tokens":null,"worst_batch_step_seconds":null,"worst_batch_peak_allocated_bytes":null,"worst_batch_peak_reserved_bytes":null,"gpu_busy_share":null,"gpu_busy_cost_seconds":null,"cpu_core":null},"phase_seconds":{},"disturbed":[],"state":"completed","source":null,"run_again":true}','logs/trial-0000.log','2026-11-22 10:33:09.138327',7.25,'5406a5520bc341d99c2cb09a25412854','c2df4a2232d14993a76e5ed409259ddd');
INSERT INTO "autotune_trials" VALUES('a597230fd3d14a47a5e2581d523700b3','709fc96c16fb48d785f513736479abb0',1,'search','{"per_device_train_batch_size":32,"gradient_accumulation_steps":2,"precision":"bf16","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null,"cpu_affinity":false}','completed','{"schema_version":1,"measurement":{"step_seconds":0.21132,"step_seconds_each":[0.21132,0.21132,0.21132],"relative_spread":0.005,"samples_per_second":302.8582244936589,"peak_allocated_bytes":23367516160,"peak_reserved_bytes":23821549568,"warmup_step_seconds":[],"micro_steps_run":2,"micro_batch_bytes":0,"optimizer_seconds":null,"data_seconds":null,"device_used_bytes":null,"context_bytes":null,"peak_reserved_first_step_bytes":null,"allocation_retries":null,"train_loss":null,"skipped_steps":null,"joules_per_sample":null,"compile_seconds":null,"new_length_seconds":null,"epoch_lengths":null,"worst_batch_tokens":null,"worst_batch_step_seconds":null,"worst_batch_peak_allocated_bytes":null,"worst_batch_peak_reserved_bytes":null,"gpu_busy_share":0.95,"gpu_busy_cost_seconds":null,"cpu_core":null},"phase_seconds":{},"disturbed":[],"state":"completed","source":null,"run_again":true}','logs/trial-0001.log','2026-11-22 10:33:09.168136',2.16,'5406a5520bc341d99c2cb09a25412854','c2df4a2232d14993a76e5ed409259ddd');
INSERT INTO "autotune_trials" VALUES('18e1608897f343d19b842378b87b67f9','709fc96c16fb48d785f513736479abb0',2,'search','{"per_device_train_batch_size":64,"gradient_accumulation_steps":1,"precision":"bf16","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null,"cpu_affinity":false}','out_of_memory','{"schema_version":1,"message":"CUDA out of memory","where":"device","during":"train","peak_allocated_bytes":null,"peak_reserved_bytes":25119686656,"phase_seconds":{},"disturbed":[],"state":"out_of_memory","source":null}','logs/trial-0002.log','2026-11-22 10:33:09.195875',9.60000000000000852651e-01,'5406a5520bc341d99c2cb09a25412854','c2df4a2232d14993a76e5ed409259ddd');
INSERT INTO "autotune_trials" VALUES('4c6ffd5ab805458f802731b0d69a1b62','709fc96c16fb48d785f513736479abb0',3,'search','{"per_device_train_batch_size":16,"gradient_accumulation_steps":4,"precision":"bf16","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null,"cpu_affinity":false}','running',NULL,'logs/trial-0003.log','2026-11-22 10:33:09.219495',NULL,'5406a5520bc341d99c2cb09a25412854','c2df4a2232d14993a76e5ed409259ddd');
CREATE TABLE autotune_workloads (
	id VARCHAR(32) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_workloads PRIMARY KEY (id), 
	CONSTRAINT uq_autotune_workloads_fingerprint UNIQUE (fingerprint)
);
INSERT INTO "autotune_workloads" VALUES('5406a5520bc341d99c2cb09a25412854','a958bbd93f71760e','{"model":"bert-large-uncased","config":{"model_type":"bert","architectures":["BertForMaskedLM"],"num_hidden_layers":24},"task":"sequence-classification","seq_len":512,"padding":0.0,"dtype":"float32","weights":null,"data":null,"peft":null,"lora_rank":null,"quantize":null,"source":null}','2026-11-22 10:33:09.088111');
CREATE TABLE studies (
	study_id INTEGER NOT NULL, 
	study_name VARCHAR(512) NOT NULL, 
	PRIMARY KEY (study_id)
);
INSERT INTO "studies" VALUES(1,'bert');
CREATE TABLE study_directions (
	study_direction_id INTEGER NOT NULL, 
	direction VARCHAR(8) NOT NULL, 
	study_id INTEGER NOT NULL, 
	objective INTEGER NOT NULL, 
	PRIMARY KEY (study_direction_id), 
	UNIQUE (study_id, objective), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "study_directions" VALUES(1,'MAXIMIZE',1,0);
CREATE TABLE study_system_attributes (
	study_system_attribute_id INTEGER NOT NULL, 
	study_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (study_system_attribute_id), 
	UNIQUE (study_id, "key"), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "study_system_attributes" VALUES(1,1,'study:metric_names','["samples/s"]');
CREATE TABLE study_user_attributes (
	study_user_attribute_id INTEGER NOT NULL, 
	study_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (study_user_attribute_id), 
	UNIQUE (study_id, "key"), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
CREATE TABLE trial_heartbeats (
	trial_heartbeat_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	heartbeat DATETIME NOT NULL, 
	PRIMARY KEY (trial_heartbeat_id), 
	UNIQUE (trial_id), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_intermediate_values (
	trial_intermediate_value_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	intermediate_value FLOAT, 
	intermediate_value_type VARCHAR(7) NOT NULL, 
	PRIMARY KEY (trial_intermediate_value_id), 
	UNIQUE (trial_id, step), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_params (
	param_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	param_name VARCHAR(512), 
	param_value FLOAT, 
	distribution_json TEXT, 
	PRIMARY KEY (param_id), 
	UNIQUE (trial_id, param_name), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_params" VALUES(1,1,'per_device_train_batch_size',3.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [1, 2, 4, 8, 16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(2,1,'precision',2.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["bf16", "fp16", "fp32", "tf32"]}}');
INSERT INTO "trial_params" VALUES(3,1,'gradient_checkpointing',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false, true]}}');
INSERT INTO "trial_params" VALUES(4,1,'attn_implementation',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["sdpa"]}}');
INSERT INTO "trial_params" VALUES(5,1,'optim',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["adamw_torch_fused"]}}');
INSERT INTO "trial_params" VALUES(6,1,'expandable_segments',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(7,1,'torch_compile',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(8,1,'use_liger_kernel',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(9,2,'per_device_train_batch_size',5.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [1, 2, 4, 8, 16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(10,2,'precision',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["bf16", "fp16", "fp32", "tf32"]}}');
INSERT INTO "trial_params" VALUES(11,2,'gradient_checkpointing',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false, true]}}');
INSERT INTO "trial_params" VALUES(12,2,'attn_implementation',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["sdpa"]}}');
INSERT INTO "trial_params" VALUES(13,2,'optim',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["adamw_torch_fused"]}}');
INSERT INTO "trial_params" VALUES(14,2,'expandable_segments',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(15,2,'torch_compile',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(16,2,'use_liger_kernel',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(17,3,'per_device_train_batch_size',6.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [1, 2, 4, 8, 16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(18,3,'precision',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["bf16", "fp16", "fp32", "tf32"]}}');
INSERT INTO "trial_params" VALUES(19,3,'gradient_checkpointing',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false, true]}}');
INSERT INTO "trial_params" VALUES(20,3,'attn_implementation',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["sdpa"]}}');
INSERT INTO "trial_params" VALUES(21,3,'optim',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["adamw_torch_fused"]}}');
INSERT INTO "trial_params" VALUES(22,3,'expandable_segments',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(23,3,'torch_compile',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(24,3,'use_liger_kernel',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(25,4,'per_device_train_batch_size',4.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [1, 2, 4, 8, 16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(26,4,'precision',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["bf16", "fp16", "fp32", "tf32"]}}');
INSERT INTO "trial_params" VALUES(27,4,'gradient_checkpointing',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false, true]}}');
INSERT INTO "trial_params" VALUES(28,4,'attn_implementation',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["sdpa"]}}');
INSERT INTO "trial_params" VALUES(29,4,'optim',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["adamw_torch_fused"]}}');
INSERT INTO "trial_params" VALUES(30,4,'expandable_segments',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(31,4,'torch_compile',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(32,4,'use_liger_kernel',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
CREATE TABLE trial_system_attributes (
	trial_system_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_system_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_system_attributes" VALUES(1,1,'fixed_params','{"per_device_train_batch_size": 8, "precision": "fp32", "gradient_checkpointing": false, "attn_implementation": "sdpa", "optim": "adamw_torch_fused", "expandable_segments": false, "torch_compile": false, "use_liger_kernel": false}');
INSERT INTO "trial_system_attributes" VALUES(2,1,'constraints:memory_over_line_gib','-11.161445312201977');
INSERT INTO "trial_system_attributes" VALUES(3,2,'constraints:memory_over_line_gib','-0.5071484372019768');
INSERT INTO "trial_system_attributes" VALUES(4,3,'constraints:memory_over_line_gib','0.7018359377980232');
CREATE TABLE trial_user_attributes (
	trial_user_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_user_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_user_attributes" VALUES(1,1,'autotune_trial_id','"7803716ba61545b9930332e25f975be4"');
INSERT INTO "trial_user_attributes" VALUES(2,1,'stage','"baseline"');
INSERT INTO "trial_user_attributes" VALUES(3,1,'gradient_accumulation_steps','8');
INSERT INTO "trial_user_attributes" VALUES(4,1,'dataloader_num_workers','0');
INSERT INTO "trial_user_attributes" VALUES(5,1,'cpu_affinity','0');
INSERT INTO "trial_user_attributes" VALUES(6,1,'samples_per_second','41.43762665993305');
INSERT INTO "trial_user_attributes" VALUES(7,1,'step_seconds','1.54449');
INSERT INTO "trial_user_attributes" VALUES(8,1,'peak_reserved_gib','11.53125');
INSERT INTO "trial_user_attributes" VALUES(9,2,'autotune_trial_id','"a597230fd3d14a47a5e2581d523700b3"');
INSERT INTO "trial_user_attributes" VALUES(10,2,'stage','"search"');
INSERT INTO "trial_user_attributes" VALUES(11,2,'gradient_accumulation_steps','2');
INSERT INTO "trial_user_attributes" VALUES(12,2,'dataloader_num_workers','0');
INSERT INTO "trial_user_attributes" VALUES(13,2,'cpu_affinity','0');
INSERT INTO "trial_user_attributes" VALUES(14,2,'samples_per_second','302.8582244936589');
INSERT INTO "trial_user_attributes" VALUES(15,2,'step_seconds','0.21132');
INSERT INTO "trial_user_attributes" VALUES(16,2,'peak_reserved_gib','22.185546875');
INSERT INTO "trial_user_attributes" VALUES(17,2,'gpu_busy_share','0.95');
INSERT INTO "trial_user_attributes" VALUES(18,3,'autotune_trial_id','"18e1608897f343d19b842378b87b67f9"');
INSERT INTO "trial_user_attributes" VALUES(19,3,'stage','"search"');
INSERT INTO "trial_user_attributes" VALUES(20,3,'gradient_accumulation_steps','1');
INSERT INTO "trial_user_attributes" VALUES(21,3,'dataloader_num_workers','0');
INSERT INTO "trial_user_attributes" VALUES(22,3,'cpu_affinity','0');
INSERT INTO "trial_user_attributes" VALUES(23,3,'peak_reserved_gib','23.39453125');
INSERT INTO "trial_user_attributes" VALUES(24,4,'autotune_trial_id','"4c6ffd5ab805458f802731b0d69a1b62"');
INSERT INTO "trial_user_attributes" VALUES(25,4,'stage','"search"');
CREATE TABLE trial_values (
	trial_value_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	objective INTEGER NOT NULL, 
	value FLOAT, 
	value_type VARCHAR(7) NOT NULL, 
	PRIMARY KEY (trial_value_id), 
	UNIQUE (trial_id, objective), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_values" VALUES(1,1,0,4.14376266599330520543e+01,'FINITE');
INSERT INTO "trial_values" VALUES(2,2,0,3.02858224493658894976e+02,'FINITE');
CREATE TABLE trials (
	trial_id INTEGER NOT NULL, 
	number INTEGER, 
	study_id INTEGER, 
	state VARCHAR(8) NOT NULL, 
	datetime_start DATETIME, 
	datetime_complete DATETIME, 
	PRIMARY KEY (trial_id), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "trials" VALUES(1,0,1,'COMPLETE','2026-11-22 10:33:09.120919','2026-11-22 10:33:09.153345');
INSERT INTO "trials" VALUES(2,1,1,'COMPLETE','2026-11-22 10:33:09.160126','2026-11-22 10:33:09.180993');
INSERT INTO "trials" VALUES(3,2,1,'PRUNED','2026-11-22 10:33:09.187972','2026-11-22 10:33:09.206050');
INSERT INTO "trials" VALUES(4,3,1,'RUNNING','2026-11-22 10:33:09.211724',NULL);
CREATE TABLE version_info (
	version_info_id INTEGER NOT NULL, 
	schema_version INTEGER, 
	library_version VARCHAR(256), 
	PRIMARY KEY (version_info_id), 
	CHECK (version_info_id=1)
);
INSERT INTO "version_info" VALUES(1,12,'5.0.0');
CREATE INDEX ix_autotune_trials_study_id_number ON autotune_trials (study_id, number);
CREATE INDEX ix_autotune_trials_environment_id_workload_id ON autotune_trials (environment_id, workload_id);
CREATE INDEX ix_autotune_jobs_state_number ON autotune_jobs (state, number);
CREATE INDEX ix_autotune_jobs_study ON autotune_jobs (study);
CREATE UNIQUE INDEX ix_studies_study_name ON studies (study_name);
CREATE INDEX ix_trials_study_id ON trials (study_id);
CREATE INDEX ix_autotune_jobs_state_place ON autotune_jobs (state, (number - 100 * priority));
COMMIT;
